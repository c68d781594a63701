"""`fedpara reproduce frontier` on the tiny scale: both stages, resuming, runs of other processes, the page."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fedpara.experiments.studies.frontier.scales import SCALES

TINY = SCALES["tiny"]
ROOT = Path(__file__).parents[3]


def tiny(cli, *more):
    return cli("reproduce", "frontier", "--scale", "tiny", "--results", "results", *more)


def rounds_run(err):
    return err.count(": round ")


def last_json(text):
    return json.loads(text.splitlines()[-1])


def test_both_stages_the_figure_and_the_page(cli, tmp_path):
    code, _, err = tiny(cli, "--seeds", 2)
    assert code != 0
    assert "Run them first, with --validation" in err
    code, text, err = tiny(cli, "--validation", "--json", "--keep", "results/frontier")
    assert code == 0, err
    assert [row["combination"] for row in last_json(text)["rows"]][-1] == "original f32/f32"
    code, text, err = tiny(cli, "--seeds", 2, "--json", "--keep", "results/frontier")
    assert code == 0, err
    made = last_json(text)
    assert {row["seeds"] for row in made["rows"]} == {"2"}
    assert made["rows"][-1]["times fewer"] == "1.0"
    figure = Path(made["figure"])
    links = set(re.findall(r'xlink:href="(\.*[^"#]*seed1)"', figure.read_text()))
    assert len(links) == len(TINY.combinations)
    assert all((figure.parent / link / "config.toml").exists() for link in links)
    code, text, err = tiny(cli, "--seeds", 2)
    assert (code, rounds_run(err)) == (0, 0), "every run is finished"
    assert "fedpara0 eden/int8" in text
    code, text, err = cli("report", "results/frontier", "--out", "frontier.md")
    assert code == 0, err
    page = (tmp_path / "frontier.md").read_text()
    assert page.count("\n## ") == 2
    assert "**original f32/f32**" in page
    assert "No combination sends fewer bytes and loses at most 1 point to `original f32/f32`." in page
    code, text, _ = cli("report", "results/frontier", "--format", "svg", "--out", "assets")
    assert (code, text.split()) == (
        0,
        ["assets/frontier-tiny-test.svg", "assets/frontier-tiny-validation.svg"],
    )
    assert all(f'data="{name}"' in page for name in text.split())


def test_runs_of_other_processes_are_picked_up_and_interrupted_ones_resumed(cli, tmp_path):
    code, text, err = tiny(cli, "--validation", "--configs", "configs", "--only", "eden, topk5+")
    assert code == 0, err
    commands = [shlex.split(line) for line in text.splitlines()]
    assert len(commands) == len(list((tmp_path / "configs").iterdir())) == 2 * len(TINY.rates)
    assert not list(tmp_path.glob("runs/**/config.toml"))
    for words in commands[:2]:
        code, _, err = cli(*words[1:])
        assert code == 0, err
    # The third one is interrupted after its first round.
    config = Path(commands[2][3])
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 1"))
    code, _, err = cli(*commands[2][1:])
    assert code == 0, err
    _, left, _ = tiny(cli, "--validation", "--configs", "configs", "--only", "eden, topk5+")
    assert left.splitlines() == text.splitlines()[2:]
    code, _, err = tiny(cli, "--validation", "--only", "eden, topk5+")
    assert code == 0, err
    assert re.findall(r"^(\S+): round (\d)/2", err, re.MULTILINE) == [
        (Path(commands[2][-1]).name, "2"),
        (Path(commands[3][-1]).name, "1"),
        (Path(commands[3][-1]).name, "2"),
    ]


def test_fedmuds_protocol_has_sections_of_its_own(cli, tmp_path):
    words = ("reproduce", "fedmud", "--scale", "digits", "--results", "results", "--rounds", 1)
    code, _, err = cli(*words)
    assert (code, "Run them first, with --validation" in err) == (2, True)
    code, text, err = cli(
        *words, "--validation", "--only", "fedavg, mud", "--json", "--keep", "results/frontier"
    )
    assert code == 0, err
    rows = {row["combination"]: row for row in last_json(text)["rows"]}
    assert {name: row["parameters"] for name, row in rows.items()} == {
        "fedavg": "216,586 (100.00%)",
        "mud": "26,122 (12.06%)",
    }
    found = tmp_path / "results" / "frontier" / "fedmud-digits" / "validation"
    assert len(list(found.iterdir())) == 2 * 7


def test_the_list_needs_no_run(cli, tmp_path):
    code, text, err = cli("reproduce", "frontier", "--scale", "tiny", "--list", "--json")
    assert code == 0, err
    listed = last_json(text)
    assert list(listed) == list(TINY.combinations)
    assert listed["original f32/f32"]["parameters"] == 784 * 256 + 256 + 256 * 10 + 10
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("frontier", "--scale", "huge"), "unknown scale 'huge'"),
        (("fedmud", "--scale", "tiny"), "unknown scale 'tiny': known: cifar10, digits."),
        (("fedmud", "--list"), "--list is for frontier or a study of the paper: leave it out"),
        (("frontier", "--scale", "tiny", "--validation", "--only", "zip"), "no combination has this"),
        (
            ("capacity-cnn", "--validation"),
            "--validation is for robustness or frontier or fedmud: leave it out",
        ),
        (("capacity-cnn", "--first-seed", "0"), "--first-seed is for robustness: leave it out"),
        (("frontier", "--attack", "noise"), "--attack is for robustness: leave it out"),
        (
            ("robustness", "--engine", "batched"),
            "--engine is for frontier or fedmud or a study of the paper or tuned-*: leave it out",
        ),
    ],
)
def test_mistakes_take_one_sentence(cli, words, message):
    code, _, err = cli("reproduce", *words)
    assert code != 0
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_page_matches_the_saved_runs(cli, tmp_path):
    folders = ("results/frontier", "results/tuning", "results/final")
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "docs").mkdir()
    code, _, err = cli("report", *folders, "--out", "docs/frontier.md")
    assert code == 0, err
    assert (tmp_path / "docs" / "frontier.md").read_text() == (ROOT / "docs" / "frontier.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "docs/guides/compression.md"])
def test_the_times_in_the_text_are_those_of_the_page(name):
    (row,) = re.findall(
        r"\*\*fedpara0.1 eden/grid0.25\*\* \|.*", (ROOT / "docs" / "frontier.md").read_text()
    )[:1]
    times, spread = row.rstrip(" |").rsplit("|", 1)[1].split(" ± ")
    assert f"{float(times):.0f} ± {float(spread):.0f} times fewer" in (ROOT / name).read_text()
