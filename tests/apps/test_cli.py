"""The command line: what it prints, which files it writes, how it exits."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

import fedpara as fp
from fedpara import data, models
from fedpara.apps.cli import app
from fedpara.experiments import Experiment, read_run
from fedpara.experiments.config import SPLITS

TINY = ["--model", "mlp", "--scheme", "fedpara", "--init", "calibrated", "--clients", "8", "--cohort", "2"]
TINY += ["--steps", "1", "--lr", "0.05"]
KEYS = ["run", "rounds", "accuracy", "bytes_up", "bytes_down", "seconds", "engine"]


@pytest.mark.parametrize(
    "command",
    [
        "inspect",
        "run",
        "resume",
        "sweep",
        "reproduce",
        "report",
        "export",
        "data list",
        "data verify",
        "data prepare",
    ],
)
def test_help_shows_an_example(cli, command):
    code, out, _ = cli(*command.split(), "--help")
    assert code == 0
    assert re.search(rf"Example:\s+fedpara {command} ", out.replace("\n", " ") + " ")


def commands(command, words=()):
    """The words of every command and group."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


@pytest.mark.parametrize("words", list(commands(get_command(app))), ids=" ".join)
def test_help_is_plain_text(cli, words):
    code, out, _ = cli(*words, "--help")
    assert code == 0
    assert "\\" not in out
    if words == ("report",):
        assert "page.html by default" in " ".join(out.split())


def test_help_names_every_choice(cli):
    text = " ".join(cli("run", "--help")[1].split()).replace("- ", "-")  # help breaks lines at hyphens
    for option, known in {"dataset": data.names(), "model": models.names(), "split": SPLITS}.items():
        assert f"--{option} TEXT {', '.join(known)}" in text
    assert "--init TEXT fan_out, calibrated, he, fit;" in text


def test_the_version_and_a_call_without_arguments(cli):
    assert cli("--version")[:2] == (0, f"fedpara {fp.__version__}\n")
    code, out, err = cli()
    assert code == 2
    assert all(command in out + err for command in ("inspect", "run", "resume", "export", "data"))


def test_run_prints_json_for_programs(cli, tmp_path):
    code, out, err = cli("run", *TINY, "--rounds", "2", "--out", "first", "--json")
    assert code == 0
    last = json.loads(out.splitlines()[-1])
    assert list(last) == KEYS
    summary = read_run(tmp_path / "first")
    assert last["run"] == "first"
    assert last["rounds"] == 2
    assert last["accuracy"] == summary.accuracy
    assert (last["bytes_up"], last["bytes_down"]) == (summary.bytes_up, summary.bytes_down)
    assert "round 2/2" in err
    assert summary.experiment == Experiment(
        model="mlp",
        init="calibrated",
        clients=8,
        cohort=2,
        epochs=None,
        steps=1,
        lr=0.05,
        rounds=2,
        scheme="fedpara",
    )


def test_run_prints_a_table_for_people(cli, tmp_path):
    code, out, _ = cli("run", *TINY, "--rounds", "1")
    assert code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"look deeper: fedpara export runs/{folder.name}" in out
    assert "accuracy" in out
    assert "fewer bytes" not in out, "a single run has nothing to compare with"


def test_runs_started_in_the_same_second_get_different_folders(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20300101-000000")
    for _ in range(2):
        code, _, err = cli("run", *TINY, "--rounds", "1")
        assert code == 0, err
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["run-20300101-000000", "run-20300101-000000-2"]


def test_fields_come_from_the_command_line_and_from_a_file(cli, tmp_path):
    (tmp_path / "my.toml").write_text(
        "model = 'mlp'\nscheme = 'lowrank'\ngamma = 0.3\nclients = 9\ncohort = 2\nrounds = 1\nlr = 0.01\n"
        "algorithm = 'fedprox'\n[options]\nmu = 0.5\n"
    )
    words = (
        "--rank 2 --seed 3 --link-up float16 --link-down bfloat16 --momentum 0.1 --weight-decay 0.01 --clip 2"
    )
    words += (
        " --lr-decay 0.9 --evaluate-every 1 --max-norm 50 --split iid --batch-size 8 --epochs 1 --engine auto"
    )
    assert cli("run", "--config", "my.toml", "--out", "a", *words.split())[0] == 0
    assert read_run(tmp_path / "a").experiment == Experiment(
        model="mlp",
        scheme="lowrank",
        rank=2,
        clients=9,
        cohort=2,
        rounds=1,
        lr=0.01,
        algorithm="fedprox",
        options={"mu": 0.5},
        seed=3,
        link_up="float16",
        link_down="bfloat16",
        momentum=0.1,
        weight_decay=0.01,
        clip=2.0,
        lr_decay=0.9,
        max_norm=50.0,
        split="iid",
        batch_size=8,
        epochs=1,
    )
    options = ["--scheme", "original", "--option", "server_lr=0.02", "--option", "beta1=0.5"]
    assert cli("run", *TINY[:2], "--algorithm", "fedadam", *options, "--rounds", "1", "--out", "b")[0] == 0
    assert read_run(tmp_path / "b").experiment.options == {"server_lr": 0.02, "beta1": 0.5}


def test_a_fallback_to_another_engine_is_reported(cli):
    private = ["--privacy", "example(noise=1.0, clip=1.0)", "--privacy-seed", "1", "--device", "cpu"]
    words = [*TINY[:2], *private, "--clients", "8", "--cohort", "2", "--steps", "1"]
    code, _, err = cli("run", *words, "--rounds", "1", "--engine", "batched", "--out", "run")
    assert code == 0
    assert (
        "engine sequential (batched was requested): one client after another on the CPU; not batched: " in err
    )
    code, _, err = cli("run", *words, "--rounds", "1", "--engine", "sequential", "--out", "another")
    assert (code, "engine" in err) == (0, False)


def test_resume_takes_a_precision(cli):
    assert cli("run", *TINY, "--rounds", "1", "--out", "run")[0] == 0
    assert cli("resume", "run", "--rounds", "2", "--precision", "float32")[0] == 0
    code, _, err = cli("resume", "run", "--rounds", "3", "--engine", "sequential", "--precision", "tf32")
    assert (code, "needs the batched or the sequential engine on a GPU" in err) == (2, True)
    assert read_run(Path("run")).rounds == 2
    assert read_run(Path("run")).experiment.precision == "float32"


def test_a_target_is_reported(cli):
    words = ["run", *TINY, "--rounds", "2", "--out", "a", "--json", "--target"]
    last = json.loads(cli(*words, "0.01")[1].splitlines()[-1])
    assert last["rounds"] == 1
    assert last["target"] == {
        "accuracy": 0.01,
        "rounds": 1,
        "bytes": last["bytes_up"] + last["bytes_down"],
    }
    words[words.index("a")] = "b"
    missed = json.loads(cli(*words, "1.0")[1].splitlines()[-1])
    assert missed["target"] == {"accuracy": 1.0, "rounds": None, "bytes": None}


def test_personal_scores_are_the_accuracy_of_private_models(cli):
    words = [
        "run",
        "--model",
        "mlp",
        "--scheme",
        "pfedpara",
        "--clients",
        "5",
        "--cohort",
        "2",
        "--steps",
        "1",
    ]
    words += ["--rounds", "1", "--json"]
    code, out, err = cli(*words, "--out", "a")
    assert (code, json.loads(out)["accuracy"]) == (0, None)
    assert err.count("the test set is not used: ") == 1
    code, out, err = cli(*words, "--personal", "--out", "b")
    row = json.loads(out)
    assert 0 <= row["accuracy"] <= 1
    assert "no accuracy" not in err
    accuracy = row["everyone"]["metrics"]["accuracy"]
    assert accuracy["clients"] == 5
    assert accuracy["worst"] <= accuracy["q10"] <= accuracy["q50"] <= accuracy["q90"]
    worst = f"{accuracy['worst']:.1%} (client {accuracy['worst_client']})"
    assert worst in cli("resume", "b")[1]
    assert "worst client" not in cli("resume", "a")[1]


def test_a_preset_compares_its_runs_and_draws_a_figure(cli, tmp_path):
    small = [
        "--model",
        "mlp",
        "--clients",
        "5",
        "--cohort",
        "2",
        "--rounds",
        "2",
        "--epochs",
        "1",
        "--lr",
        "0.01",
    ]
    code, out, _ = cli("run", "quickstart", *small, "--out", "demo")
    assert code == 0
    table = out
    for name in ("original", "lowrank", "fedpara", "pfedpara"):
        assert read_run(tmp_path / "demo" / name).rounds == 2
        assert re.search(rf"{name} .*%", out)
    assert "times fewer bytes" in out
    assert "look deeper: fedpara" in out
    assert (tmp_path / "demo" / "accuracy-against-bytes.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = cli("resume", "demo", "--json")
    last = json.loads(out.splitlines()[-1])
    assert list(last) == ["run", "runs"], "a number would be that of a single run"
    assert last["run"] == "demo"
    assert list(last["runs"]) == ["fedpara", "lowrank", "original", "pfedpara"]
    everyone = last["runs"]["pfedpara"].pop("everyone")
    assert (everyone["clients"], everyone["of"]) == (5, 5)
    assert all(list(row) == KEYS for row in last["runs"].values())
    assert "(all 5 clients)" in table, "a personal accuracy says how many clients it averages"


def test_resume_continues_and_says_from_where(cli, tmp_path):
    assert cli("run", *TINY, "--rounds", "2", "--out", "a")[0] == 0
    code, out, err = cli("resume", "a", "--rounds", "4", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 4
    assert "resumed after round 2" in err
    assert cli("run", *TINY, "--rounds", "4", "--out", "b")[0] == 0
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()


# A shell that starts the suite in the background ignores SIGINT, and children inherit that.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from fedpara.apps.cli import main; main()"
)


def test_ctrl_c_leaves_a_resumable_run(cli, tmp_path):
    words = ["run", *TINY, "--rounds", "100000", "--out", "long"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        metrics = tmp_path / "long" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    assert b"fedpara resume" in err
    assert b"Traceback" not in err
    done = read_run(tmp_path / "long").rounds
    assert done > 2
    assert "stopped: KeyboardInterrupt" in (tmp_path / "long" / "log.txt").read_text()
    assert cli("resume", "long", "--rounds", done + 1)[0] == 0
    assert cli("run", *TINY, "--rounds", done + 1, "--out", "short")[0] == 0
    assert metrics.read_bytes() == (tmp_path / "short" / "metrics.jsonl").read_bytes()


def test_data_list(cli):
    code, out, _ = cli("data", "list")
    assert code == 0
    assert re.search(r"digits +here", out)
    assert re.search(r"cifar10 +missing", out)
    code, out, _ = cli("data", "list", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["name"] for row in rows] == data.names()
    assert [row["present"] for row in rows] == [name == "digits" for name in data.names()]
    assert cli("data", "verify", "digits")[0] == 0
    assert "digits" in cli("data", "prepare", "digits")[1]


def test_tracking_files_are_written_to_the_run_folder(cli, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install '.[track]'")
    assert cli("run", *TINY, "--rounds", "1", "--track", "tensorboard", "--out", "a")[0] == 0
    assert list((tmp_path / "a" / "tensorboard").glob("events.out.tfevents.*"))
