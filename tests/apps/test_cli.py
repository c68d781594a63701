"""The command line as a user meets it: what it prints, what it leaves, how it ends."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.main import get_command

import fedpara as fp
from fedpara import data, models
from fedpara.apps import merged
from fedpara.apps.cli import app
from fedpara.data import normalise
from fedpara.engines.flower import ACCEPTED
from fedpara.experiments import Experiment, read_run, run
from fedpara.experiments.build import build, build_model, build_scheme
from fedpara.experiments.files import write_groups
from fedpara.experiments.store import final_state

TINY = ["--model", "mlp", "--scheme", "fedpara", "--init", "calibrated", "--clients", "8", "--cohort", "2"]
TINY += ["--steps", "1", "--lr", "0.05"]
PERSONAL = {"model": "mlp", "scheme": "pfedpara", "clients": 2, "cohort": 2, "epochs": None, "steps": 1}
KEYS = ["run", "rounds", "accuracy", "bytes_up", "bytes_down", "seconds", "engine"]


@pytest.mark.parametrize(
    "command",
    ["inspect", "run", "resume", "reproduce", "report", "export", "data list", "data verify", "data prepare"],
)
def test_help_shows_an_example(cli, command):
    code, out, _ = cli(*command.split(), "--help")
    assert code == 0
    assert re.search(rf"Example:\s+fedpara {command} ", out.replace("\n", " ") + " ")


def commands(command, words=()):
    """The words of every command, and of every group of them."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


@pytest.mark.parametrize("words", list(commands(get_command(app))), ids=" ".join)
def test_help_is_plain_text(cli, words):
    code, out, _ = cli(*words, "--help")
    assert code == 0
    assert "\\" not in out
    if words == ("report",):
        assert "[default: page.html]" in out


def test_the_version_and_the_bare_call(cli):
    assert cli("--version")[:2] == (0, f"fedpara {fp.__version__}\n")
    code, out, err = cli()
    assert code == 2
    assert all(command in out + err for command in ("inspect", "run", "resume", "export", "data"))


def test_inspect_prints_a_table(cli):
    code, out, _ = cli("inspect", "vgg16", "--scheme", "fedpara", "--gamma", "0.1", "--classes", "10")
    assert code == 0
    assert "1,545,442" in out
    assert "original 15,253,578 parameters, 9.87 times as many" in out
    row = next(line for line in out.splitlines() if "512 x 512 x 3 x 3" in line)
    assert "fedpara" in row
    assert "dense (" in out


def test_inspect_for_programs(cli):
    code, out, _ = cli("inspect", "vgg16", "--gamma", "0.1", "--json")
    assert code == 0
    report = json.loads(out)
    assert list(report) == ["parameters", "original_parameters", "ratio", "layers"]
    assert (report["parameters"], report["original_parameters"]) == (1_545_442, 15_253_578)
    assert report["ratio"] == pytest.approx(1_545_442 / 15_253_578)
    for layer in report["layers"]:
        assert list(layer) == ["name", "shape", "scheme", "rank", "max_rank", "parameters"]
    assert sum(layer["parameters"] for layer in report["layers"]) == report["parameters"]
    written = [layer for layer in report["layers"] if layer["scheme"] == "fedpara"]
    assert len(written) == 13
    assert all(layer["rank"] ** 2 >= layer["max_rank"] for layer in written)
    dense = [layer for layer in report["layers"] if layer["scheme"] == "dense"]
    assert all(layer["rank"] is None for layer in dense)


def test_inspect_gives_the_model_its_scheme_by_default(cli):
    plain, rank, low = (
        json.loads(cli("inspect", "mlp", *options, "--json")[1])
        for options in ([], ["--rank", "3"], ["--scheme", "lowrank", "--ratio", "0.2"])
    )
    assert plain == json.loads(cli("inspect", "mlp", "--gamma", "0.1", "--json")[1])
    assert {layer["rank"] for layer in rank["layers"] if layer["scheme"] == "fedpara"} == {3}
    assert low["ratio"] == pytest.approx(0.2, abs=0.03)


def test_inspect_reads_a_module_of_the_users_own(cli, tmp_path):
    (tmp_path / "theirs.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Linear(100, 80), nn.ReLU(), nn.Linear(80, 3))\n"
        "def broken():\n    raise KeyError('weights')\n"
        "number = 3\n"
    )
    code, out, _ = cli("inspect", "theirs:build", "--gamma", "0", "--json")
    assert code == 0
    layers = {layer["name"]: layer for layer in json.loads(out)["layers"]}
    assert layers["0.weight"]["shape"] == [80, 100]
    assert layers["0.weight"]["rank"] == 9
    assert layers["2.weight"]["scheme"] == "dense"
    code, out, _ = cli("inspect", "theirs:build")
    assert code == 0
    assert "dense (" in out
    for target, says in (
        ("theirs:biuld", "Did you mean 'build'"),
        ("theirs:broken", "KeyError"),
        ("theirs:number", "no function 'number'"),
        ("nowhere:build", "could not be imported"),
        ("theirs:", "does not name a function"),
    ):
        code, out, err = cli("inspect", target)
        assert (code, out) == (2, "")
        assert says in err


def test_run_for_programs(cli, tmp_path):
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


def test_run_for_people(cli, tmp_path):
    code, out, _ = cli("run", *TINY, "--rounds", "1")
    assert code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"look deeper: fedpara export runs/{folder.name}" in out
    assert "accuracy" in out


def test_every_field_can_be_said_on_the_command_line_or_in_a_file(cli, tmp_path):
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


def test_another_engine_than_the_one_asked_for_is_said(cli):
    words = [
        "--model",
        "resnet18-tiny",
        "--scheme",
        "original",
        "--clients",
        "8",
        "--cohort",
        "2",
        "--steps",
        "1",
    ]
    code, _, err = cli("run", *words, "--rounds", "1", "--engine", "batched", "--out", "run")
    assert code == 0
    assert (
        "engine sequential (batched was asked for): one client after another on the CPU; not batched: " in err
    )
    code, _, err = cli("run", *words, "--rounds", "1", "--engine", "sequential", "--out", "another")
    assert (code, "engine" in err) == (0, False)


def test_resume_takes_a_precision(cli):
    assert cli("run", *TINY, "--rounds", "1", "--out", "run")[0] == 0
    assert cli("resume", "run", "--rounds", "2", "--precision", "float32")[0] == 0
    code, _, err = cli("resume", "run", "--rounds", "3", "--engine", "sequential", "--precision", "tf32")
    assert (code, "sequential computes in float32" in err) == (2, True)
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
    assert "no accuracy is measured" in err
    code, out, err = cli(*words, "--personal", "--out", "b")
    assert 0 <= json.loads(out)["accuracy"] <= 1
    assert "no accuracy" not in err


def test_the_preset_compares_and_draws(cli, tmp_path):
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
    for name in ("original", "lowrank", "fedpara", "pfedpara"):
        assert read_run(tmp_path / "demo" / name).rounds == 2
        assert re.search(rf"{name} .*%", out)
    assert "times fewer bytes" in out
    assert "look deeper: fedpara" in out
    assert (tmp_path / "demo" / "accuracy-against-bytes.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = cli("resume", "demo", "--json")
    last = json.loads(out.splitlines()[-1])
    assert list(last) == [*KEYS, "runs"]
    assert list(last["runs"]) == ["fedpara", "lowrank", "original", "pfedpara"]
    assert all(list(row) == KEYS for row in last["runs"].values())


def test_resume_goes_on_and_says_where_it_was(cli, tmp_path):
    assert cli("run", *TINY, "--rounds", "2", "--out", "a")[0] == 0
    code, out, err = cli("resume", "a", "--rounds", "4", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 4
    assert "resumed after round 2" in err
    assert cli("run", *TINY, "--rounds", "4", "--out", "b")[0] == 0
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()


# A shell that starts the suite in the background has SIGINT ignored, and children inherit that.
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
        # A shell that puts a job in the background has it ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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


@pytest.mark.parametrize("scheme", ["original", "fedpara"])
def test_an_exported_run_is_a_plain_model(cli, tmp_path, scheme):
    experiment = Experiment(
        model="mlp", scheme=scheme, clients=8, cohort=2, rounds=2, epochs=None, steps=2, lr=0.01
    )
    run(experiment, tmp_path / "run")
    code, out, _ = cli("export", "run", "--format", "safetensors", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["path"] == "run/model.merged.safetensors"
    plain = models.mlp(64, classes=10)
    plain.load_state_dict(load_file(tmp_path / report["path"]))
    assert report["parameters"] == sum(p.numel() for p in plain.parameters())

    trained = build_model(experiment, 10, (1, 8, 8), build_scheme(experiment))
    trained.load_state_dict(final_state(tmp_path / "run")[0])
    _, test = data.load("digits")
    images = normalise(test.inputs, test.mean, test.std)
    with torch.no_grad():
        logits = plain(images)
        torch.testing.assert_close(logits, trained(images), rtol=1e-5, atol=1e-5)
    accuracy = float((logits.argmax(1) == test.labels).double().mean())
    assert accuracy == pytest.approx(read_run(tmp_path / "run").accuracy, abs=1e-12)

    code, _, err = cli("export", "run")
    assert code == 2
    assert "model.merged.safetensors exists" in " ".join(err.split())
    assert "--out" in err
    assert "--overwrite" in err
    assert cli("export", "run", "--overwrite")[0] == 0
    assert cli("export", "run", "--out", "other.safetensors")[0] == 0
    assert (tmp_path / "other.safetensors").exists()


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("scheme", "share"), [("pfedpara", "all"), ("original", "fedper"), ("fedpara", "none")]
)
def test_a_client_exports_its_own_model(cli, tmp_path, scheme, share):
    fields = {"model": "mlp", "scheme": scheme, "share": share, "engine": "sequential", "epochs": None}
    experiment = Experiment(**fields, clients=8, cohort=2, rounds=3, steps=2, lr=0.01)
    run(experiment, tmp_path / "run")
    parts = build(experiment)
    same = {"rounds": 3, "cohort": 2, "share": share, "engine": "sequential"}
    simulated = fp.simulate(parts.task, parts.data, parts.algorithm, **same)
    taken = sorted({client for result in simulated.rounds for client in result.cohort})
    assert 2 < len(taken) < 8
    # A kill between a round's files and its checkpoint leaves such files: they are not the run's, and stay.
    for later in ("0/0-4", "0/7-4", "0/.0123456789abcdef.part"):
        path = tmp_path / "run" / "clients" / f"{later}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"of a later round")
    before = everything(tmp_path / "run")

    code, out, err = cli("export", "run")
    assert (code, out) == (2, "")
    listed = ", ".join(map(str, taken))
    assert f"expected --client with one of the {len(taken)} that have taken part ({listed})." in " ".join(
        err.split()
    )
    never = next(client for client in range(8) if client not in taken)
    code, _, err = cli("export", "run", "--client", never)
    assert (code, f"client {never} has taken part in no round of run" in err) == (2, True)
    assert everything(tmp_path / "run") == before

    states = []
    for client in taken:
        code, out, _ = cli("export", "run", "--client", client, "--json")
        assert code == 0
        path = json.loads(out)["path"]
        assert path == f"run/model-client-{client}.merged.safetensors"
        states.append(load_file(tmp_path / path))
        own = simulated.client_state(client)
        plain = own if scheme == "original" else fp.merge(parts.task.model, own).state_dict()
        assert states[-1].keys() == plain.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(states[-1][name], tensor, rtol=1e-5, atol=1e-6)
        (tmp_path / path).unlink()
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert everything(tmp_path / "run") == before


def test_a_run_that_goes_on_is_exported_at_one_checkpoint(cli, tmp_path, monkeypatch):
    run(Experiment(**PERSONAL, rounds=3), tmp_path / "run")
    seen = []

    def moving(path):
        state, round = final_state(path)
        seen.append(round)
        return (state, round) if len(seen) > 1 else ({}, 0)

    monkeypatch.setattr(merged, "final_state", moving)
    assert cli("export", "run", "--client", 0)[0] == 0
    assert seen == [3, 3]


@pytest.mark.parametrize("scheme", ["original", "pfedpara"])
def test_a_file_of_a_run_folder_is_no_model(cli, tmp_path, scheme):
    run(Experiment(**{**PERSONAL, "scheme": scheme, "algorithm": "scaffold"}, rounds=2), tmp_path / "run")
    (kept, *_) = (tmp_path / "run" / "clients").rglob("*.safetensors")
    before = everything(tmp_path)
    for path, what in (
        (tmp_path / "run" / "checkpoint.safetensors", "is a run's checkpoint"),
        (tmp_path / "run" / "checkpoint.previous.safetensors", "is a run's checkpoint"),
        (kept, "is what a client of a run keeps"),
    ):
        code, _, err = cli("export", path)
        assert code == 1
        said = " ".join(err.split())
        assert what in said
        assert "Export the run's folder instead." in said
    assert everything(tmp_path) == before


def test_a_client_that_has_no_model_of_its_own_to_export(cli, tmp_path):
    scaffold = {**PERSONAL, "scheme": "fedpara", "algorithm": "scaffold"}
    run(Experiment(**scaffold, rounds=1), tmp_path / "run")
    assert list((tmp_path / "run" / "clients").rglob("*.safetensors"))
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 2
    assert "no client keeps a part of it" in err
    assert cli("export", "run")[0] == 0
    code, _, err = cli("export", "run/model.merged.safetensors", "--client", 0)
    assert code == 2
    assert "--client expects a run folder" in err


def test_what_clients_keep_may_be_elsewhere(cli, tmp_path):
    run(Experiment(**PERSONAL, rounds=1), tmp_path / "run")
    shutil.move(tmp_path / "run" / "clients", tmp_path / "clients")
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "its clients folder holds none" in err

    write_groups_of_flower(tmp_path / "run", round=1)
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "expected nodes-abc in run. Copy that folder there" in " ".join(err.split())
    (tmp_path / "run" / "nodes-abc" / "0").mkdir(parents=True)
    kept = tmp_path / "clients" / "0" / "0-1.safetensors"
    shutil.copy(kept, tmp_path / "run" / "nodes-abc" / "0" / "1.safetensors")
    assert cli("export", "run", "--client", 0)[0] == 0


def write_groups_of_flower(folder, round):
    """What Flower's server notes of client 0: the round it took; the rest is on the node."""
    (folder / "nodes.txt").write_text("abc\n")
    (folder / "clients" / "0").mkdir(parents=True)
    noted = {ACCEPTED: {"round": torch.tensor(round)}}
    write_groups(folder / "clients" / "0" / f"0-{round}.safetensors", noted)


def test_what_cannot_be_exported_is_said(cli, tmp_path):
    lay = Experiment(model="mlp", scheme="original", clients=8, cohort=2, rounds=1, epochs=None, steps=1)
    run(lay, tmp_path / "run")
    for arguments, code, says in (
        (["nowhere"], 2, "does not exist"),
        (["run", "--format", "tflite"], 2, "unknown format 'tflite'"),
        ([tmp_path], 2, "not a run folder"),
        ([tmp_path / "run" / "config.toml"], 1, "expected a whole safetensors file"),
    ):
        found, _, err = cli("export", *arguments)
        assert (found, says in err) == (code, True), err
    for damaged in ("{}", "[]", '{"name": "mlp", "classes": "x", "shape": [64]}'):
        (tmp_path / "run" / "model.json").write_text(damaged)
        code, _, err = cli("export", "run")
        assert (code, "model.json is damaged: expected" in err) == (1, True), err
    (tmp_path / "run" / "model.json").unlink()
    code, _, err = cli("export", "run")
    assert code == 1
    assert "model.json cannot be read" in err
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    code, _, err = cli("export", "run")
    assert code == 1
    assert "no readable checkpoint" in err


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


def test_a_tracked_run_has_its_tracks_beside_it(cli, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'fedpara[track]'")
    assert cli("run", *TINY, "--rounds", "1", "--track", "tensorboard", "--out", "a")[0] == 0
    assert list((tmp_path / "a" / "tensorboard").glob("events.out.tfevents.*"))
