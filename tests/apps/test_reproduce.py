"""`fedpara reproduce`: miniatures of every study, the list, mistakes."""

import json
from pathlib import Path

import pytest

from fedpara.experiments import paper, read_run
from fedpara.report.tables import NOT_REACHED, NOT_RUN

TRAINED = [name for name in paper.STUDIES if paper.runs(name)]
MINIATURE = "ours is a miniature: generated data, small networks, 2 rounds"
ONLY = {"capacity-cnn": "cifar10-", "gamma-sweep": "cifar10-iid"}
"""Of the studies with the most runs."""
BARE = [name for name in paper.STUDIES if name not in TRAINED]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all studies, because they share runs."""
    return tmp_path_factory.mktemp("paper")


def tiny(cli, name, out, *more):
    given = ("--scale", "tiny", "--seeds", 1, "--engine", "sequential", "--out", out, *more)
    code, text, err = cli("reproduce", name, *given)
    assert code == 0, err
    return text, err


def rounds_run(err):
    return err.count(": round ")


@pytest.mark.parametrize("name", TRAINED)
def test_a_miniature_of_every_study_with_training(cli, out, name):
    """Two rounds on generated data. `communication` runs the other data sets of `capacity-cnn`."""
    only = ("--only", ONLY[name]) if name in ONLY else ()
    found, _ = tiny(cli, name, out, "--json", *only)
    study, printed = paper.study(name), json.loads(found.splitlines()[-1])[name]
    assert printed["caveat"] == MINIATURE
    cells = printed["cells"]
    assert [(cell["row"], cell["column"]) for cell in cells] == [(c.row, c.column) for c in study.cells]
    assert any(cell["text"] == NOT_RUN for cell in cells) == (name in ONLY)
    for cell, declared in zip(cells, study.cells, strict=True):
        assert cell["paper"] == declared.paper
        if cell["ours"] is None:
            assert cell["text"] in (NOT_RUN, NOT_REACHED)
        else:
            assert bool(cell["runs"]) == bool(declared.experiments)
            assert all((Path(out).parent / run).is_dir() for run in cell["runs"])
    figure = printed["figure"]
    assert (study.figure == "none") == (figure == "")
    assert not figure or Path(figure).stat().st_size > 5000


@pytest.mark.parametrize("name", ["optimizers", "training-time"])
def test_a_finished_study_is_printed_without_a_run(cli, out, name):
    """As a table and as a chart."""
    tiny(cli, name, out, "--json")
    text, err = tiny(cli, name, out)
    assert rounds_run(err) == 0, "every run is finished"
    assert text.startswith(f"{name}: {paper.study(name).title}")
    assert text.splitlines()[1] == MINIATURE
    assert NOT_RUN not in text


@pytest.mark.parametrize("name", BARE)
def test_studies_without_training_start_no_run(cli, name):
    code, text, err = cli("reproduce", name)
    assert code == 0, err
    assert NOT_RUN not in text
    assert "miniature" not in text
    assert list(Path.cwd().rglob("config.toml")) == []


def test_the_list_shows_every_name_and_its_cost(cli):
    code, text, _ = cli("reproduce", "--list", "--json")
    assert code == 0
    listed = json.loads(text)
    assert list(listed["studies"]) == list(paper.STUDIES)
    for name, row in listed["studies"].items():
        assert (row["runs"] > 0) == (row["gpu_minutes"] > 0) == (row["gigabytes"] > 0) == (name in TRAINED)
    assert listed["all"]["runs"] < sum(row["runs"] for row in listed["studies"].values()), (
        "shared runs count once"
    )
    # 16 clients x 200 rounds x 122 MB and 12.4 MB
    assert listed["studies"]["training-time"]["gigabytes"] == pytest.approx(
        16 * 200 * (0.1220 + 0.0124), rel=0.01
    )
    code, text, _ = cli("reproduce", "--list")
    assert code == 0
    assert all(name in text for name in paper.STUDIES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a table or figure"),
        (["capacity-cn"], "did you mean 'capacity-cnn'"),
        (["optimizers", "--scale", "small"], "expected paper or tiny"),
        (["optimizers", "--seeds", "0"], "seeds"),
        (["optimizers", "--only", "zzz"], "The 5 runs are cifar10-iid-vgg16-"),
        (
            ["optimizers", "table-sizes", "--only", "zzz"],
            "no run of optimizers, table-sizes has this in its name",
        ),
        (["table-sizes", "--only", "zzz"], "table-sizes is computed and needs no run"),
    ],
)
def test_mistakes(cli, tmp_path, arguments, says):
    code, _, err = cli("reproduce", *arguments)
    assert code == 2
    assert says in err
    assert list(tmp_path.rglob("config.toml")) == []


def test_the_device_is_that_of_the_runs(cli, tmp_path):
    tiny(cli, "personalization", tmp_path / "runs", "--only", "mnist-shards", "--device", "cpu")
    devices = {read_run(path.parent).experiment.device for path in tmp_path.rglob("config.toml")}
    assert devices == {"cpu"}
    for name in ("personalization", "robustness"):
        scale = () if name == "robustness" else ("--scale", "tiny")
        code, _, err = cli("reproduce", name, *scale, "--out", tmp_path / "no", "--device", "cuda:99")
        assert (code, "device is 'cuda:99': expected one of cpu" in err) == (2, True)


def test_missing_data_is_named(cli, tmp_path):
    code, _, err = cli("reproduce", "optimizers", "--data-dir", tmp_path / "nothing")
    assert code == 1
    assert "cifar10 is not in" in err
