"""A user's mistake gives a short message and the right exit code, and leaves no files behind."""

import re
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file

from fedpara.experiments.trackers import TRACKERS

TINY = ["--model", "mlp", "--scheme", "original", "--clients", "8", "--cohort", "2", "--steps", "1"]

BAD = {
    "dataset": (["run", "--dataset", "digit"], 2, "Did you mean 'digits'"),
    "missing dataset": (["run", "--dataset", "mnist"], 1, "mnist"),
    "model": (["run", "--model", "vgg61"], 2, "did you mean 'vgg16'? Known: vgg16, "),
    "custom model": (
        ["run", "--model", "os:getcwd"],
        2,
        "'os:getcwd' returned str: expected a torch.nn.Module",
    ),
    "preset": (["run", "quikstart"], 2, "did you mean 'quickstart'"),
    "scheme": (["run", "--scheme", "fedparra"], 2, "did you mean 'fedpara'"),
    "algorithm": (["run", "--algorithm", "fedproxy"], 2, "did you mean 'fedprox'"),
    "engine": (["run", "--engine", "sequentail"], 2, "did you mean 'sequential'"),
    "share": (["run", "--share", "some"], 2, "unknown share 'some'"),
    "split": (["run", "--split", "dirichlett"], 2, "did you mean 'dirichlet'"),
    "cohort above clients": (["run", "--clients", "5", "--cohort", "6"], 2, "cohort"),
    "zero rounds": (["run", "--rounds", "0"], 2, "rounds is 0"),
    "alpha": (["run", "--alpha", "0"], 2, "alpha = 0.0"),
    "gamma": (["run", "--gamma", "1.5"], 2, "gamma"),
    "rank": (["run", "--rank", "0"], 2, "rank"),
    "more clients than examples": (["run", "--clients", "5000"], 2, "5000"),
    "lr": (["run", "--lr", "0"], 2, "lr is 0.0"),
    "link": (["run", "--link-up", "float8"], 2, "float8"),
    "option": (["run", "--option", "mu"], 2, "mu"),
    "option of another": (["run", "--option", "mu=1"], 2, "'mu'"),
    "owners": (["run", "--split", "owner"], 2, "own"),
    "image model": (["run", "--model", "vgg16"], 2, "(1, 8, 8)"),
    "jacobian": (["run", "--scheme", "original", "--jacobian", "1"], 2, "Jacobian"),
    "precision": (["run", "--engine", "sequential", "--precision", "tf32"], 2, "float32"),
    "target": (["run", "--target", "80"], 2, "target"),
    "number": (["run", "--rounds", "many"], 2, "not a valid integer"),
    "flag": (["run", "--round", "3"], 2, "--round"),
    "command": (["ran"], 2, "ran"),
    "tracker": (["run", "--track", "visdom"], 2, "unknown tracker 'visdom'"),
    "preset and config": (["run", "quickstart", "--config", "x"], 2, "both given"),
    "preset and scheme": (["run", "quickstart", "--scheme", "fedpara"], 2, "compares schemes itself"),
    "config": (["run", "--config", "nowhere.toml"], 2, "No such file"),
    "resume": (["resume", "nowhere"], 2, "no config.toml"),
    "inspect model": (["inspect", "vgg61"], 2, "did you mean 'vgg16'? Known: vgg16, "),
    "inspect scheme": (["inspect", "mlp", "--scheme", "original"], 2, "scheme 'original' factorizes nothing"),
    "inspect gamma": (["inspect", "mlp", "--gamma", "2"], 2, "gamma"),
    "inspect rank": (["inspect", "mlp", "--rank", "100000"], 2, "100000"),
    "inspect both": (["inspect", "mlp", "--gamma", "0.1", "--rank", "3"], 2, "rank"),
    "inspect ratio": (["inspect", "mlp", "--ratio", "0.5"], 2, "ratio"),
    "data": (["data", "verify", "digit"], 2, "Did you mean 'digits'"),
    "missing data": (["data", "verify", "mnist"], 1, "fedpara: missing: mnist. Get the files"),
    "prepare missing data": (["data", "prepare", "cifar10"], 1, "cifar10"),
}


@pytest.mark.parametrize("mistake", sorted(BAD))
def test_mistakes(cli, tmp_path, mistake):
    arguments, expected, says = BAD[mistake]
    if arguments[0] == "run" and "quickstart" not in arguments:
        arguments = [*arguments, "--out", "run"]
    code, out, err = cli(*arguments)
    assert code == expected, err
    assert says in err
    assert not (tmp_path / "run").exists(), "a mistake leaves nothing behind"
    assert not (tmp_path / "runs").exists()
    assert out == "" or mistake == "missing data"


def test_missing_and_damaged_data_sets_are_told_apart(cli, tmp_path):
    code, out, err = cli("data", "verify", "mnist", "--data-dir", "nowhere")
    assert (code, out.split()) == (1, ["mnist", "missing"])
    assert "mnist is not in nowhere" in err
    assert "published" not in err
    (tmp_path / "mnist").mkdir()
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "mnist" / f"{part}-ubyte").write_bytes(b"torn")
    code, out, err = cli("data", "verify", "mnist", "--data-dir", ".")
    assert (code, out.split()[:2]) == (1, ["mnist", "damaged"])
    assert "4 of 4 files compared with known checksums" in out
    assert "not as published: mnist" in err
    assert "missing" not in err
    code, out, _ = cli("data", "verify", "digits")
    assert (code, out.split()[:2]) == (0, ["digits", "ok"])
    assert "no known checksums" in out


@pytest.mark.parametrize(
    "words",
    [["inspect", "nope"], ["export", "state", "--model", "nope"], ["reproduce", "nope"]],
    ids=" ".join,
)
def test_an_unknown_name_lists_the_known_ones(cli, tmp_path, words):
    save_file({"a": torch.zeros(3)}, tmp_path / "state")
    code, _, err = cli(*words)
    assert (code, "id you mean" in err) == (2, False)
    assert ("capacity-cnn" if words[0] == "reproduce" else "resnet18") in err


def test_an_unknown_key_in_a_config_file_is_reported_with_its_line(cli, tmp_path):
    (tmp_path / "my.toml").write_text("lr = 0.1\n\nroundz = 3\n")
    code, _, err = cli("run", "--config", "my.toml", "--out", "run")
    assert code == 2
    assert "my.toml, line 3: unknown key 'roundz': did you mean 'rounds'?" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", [[], ["quickstart"]])
def test_an_unusable_output_folder_is_rejected(cli, tmp_path, preset):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").touch()
    code, _, err = cli("run", *preset, "--out", "file")
    assert code == 2
    assert "file" in err
    assert "--out" in err
    assert (tmp_path / "file").read_text() == "mine"
    code, _, err = cli("run", *preset, "--out", "full")
    assert code == 2
    assert "not empty" in err
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["thesis"]


def test_a_preset_checks_every_folder_before_it_makes_one(cli, tmp_path):
    (tmp_path / "q" / "lowrank").mkdir(parents=True)
    (tmp_path / "q" / "lowrank" / "thesis.tex").touch()
    code, _, err = cli("run", "quickstart", "--out", "q")
    assert (code, "not empty and holds no run" in err) == (2, True)
    assert [entry.name for entry in (tmp_path / "q").iterdir()] == ["lowrank"]


def test_an_existing_run_is_kept_and_the_error_shows_how_to_resume_it(cli):
    assert cli("run", *TINY, "--rounds", "1", "--out", "a")[0] == 0
    code, _, err = cli("run", *TINY, "--rounds", "1", "--out", "a")
    assert code == 2
    assert "fedpara resume a" in err


def test_a_preset_is_not_written_into_a_run_folder(cli, tmp_path):
    assert cli("run", *TINY, "--rounds", "1", "--out", "a")[0] == 0
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    code, out, err = cli("run", "quickstart", "--out", "a")
    assert (code, out) == (2, "")
    assert "a already holds a run" in err
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before


def test_a_preset_does_not_replace_an_existing_figure(cli, tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "accuracy-against-bytes.png").write_text("mine")
    code, _, err = cli("run", "quickstart", "--out", "q")
    assert (code, "not empty" in err) == (2, True)
    assert (tmp_path / "q" / "accuracy-against-bytes.png").read_text() == "mine"


def test_a_failed_run_exits_with_1_and_the_reason(cli, tmp_path):
    words = [
        "run",
        "--model",
        "mlp",
        "--scheme",
        "original",
        "--clients",
        "8",
        "--cohort",
        "2",
        "--lr",
        "1e6",
    ]
    code, _, err = cli(*words, "--rounds", "30", "--out", "a")
    assert code == 1
    assert re.search(r"fedpara: round \d+: no update is left, and \d+ of \d+ clients diverged", err)
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        (tmp_path / "a" / name).write_bytes(b"torn")
    code, _, err = cli("resume", "a")
    assert code == 1
    assert "can be used" in err


def test_a_missing_tracker_is_reported_before_anything_is_written(cli, tmp_path):
    missing = [kind for kind in TRACKERS if kind != "none" and find_spec(kind) is None]
    if not missing:
        pytest.skip("every tracker is installed")
    code, _, err = cli("run", *TINY, "--rounds", "1", "--track", missing[0], "--out", "a")
    assert code == 1
    assert f"needs the package {missing[0]}: " in err
    assert "pip install" in err
    assert not (tmp_path / "a").exists()
