"""`fedpara export` of a run: the merged model, where it is written, and runs that cannot be exported."""

import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedpara import data, models
from fedpara.apps import export_source
from fedpara.data import normalise
from fedpara.errors import DataError
from fedpara.experiments import Experiment, read_run, run
from fedpara.experiments.build import build_model, build_scheme
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.summary import read_config

TINY = {"model": "mlp", "clients": 2, "cohort": 2, "epochs": None, "steps": 1}
PLAIN = {**TINY, "scheme": "original"}
OWN = "load:theirs_named:load"
CHECKPOINTS = ("checkpoint.safetensors", "checkpoint.previous.safetensors")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    trained.load_state_dict(final_checkpoint(tmp_path / "run").state)
    _, test = data.load("digits")
    images = normalise(test.inputs, test.mean, test.std)
    with torch.no_grad():
        logits = plain(images)
        torch.testing.assert_close(logits, trained(images), rtol=1e-5, atol=1e-5)
    accuracy = float((logits.argmax(1) == test.targets).double().mean())
    assert accuracy == pytest.approx(read_run(tmp_path / "run").accuracy, abs=1e-12)

    code, _, err = cli("export", "run")
    assert code == 2
    assert "model.merged.safetensors exists" in " ".join(err.split())
    assert "--out" in err
    assert "--overwrite" in err
    assert cli("export", "run", "--overwrite")[0] == 0
    assert cli("export", "run", "--out", "other.safetensors")[0] == 0
    assert (tmp_path / "other.safetensors").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A digits run that learned enough for raw and normalised inputs to score differently."""
    path = tmp_path_factory.mktemp("runs") / "trained"
    fields = {"model": "mlp", "scheme": "fedpara", "clients": 4, "cohort": 4, "epochs": 2, "lr": 0.05}
    run(Experiment(**fields, rounds=5), path)
    return path


@pytest.fixture
def older(trained, tmp_path):
    """The same run as an earlier version wrote it, without the normalisation."""
    shutil.copytree(trained, tmp_path / "run")
    described = json.loads((trained / "model.json").read_text())
    del described["normalise"]
    (tmp_path / "run" / "model.json").write_text(json.dumps(described))
    return tmp_path / "run"


def accuracy(path, inputs, labels):
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (outputs,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        logits = torch.from_numpy(outputs)
    else:
        logits = torch.export.load(path).module()(inputs)
    return float((logits.argmax(1) == labels).double().mean())


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_an_exported_run_takes_raw_inputs(cli, tmp_path, trained, format):
    _, test = data.load("digits")
    images = normalise(test.inputs, test.mean, test.std)
    expected = read_run(trained).accuracy
    file = tmp_path / f"m.{format}"
    code, out, _ = cli("export", trained, "--format", format, "--out", file)
    assert (code, "inputs: uint8 [batch, 1, 8, 8], raw. The model normalises them" in out) == (0, True), out
    assert accuracy(file, test.inputs, test.targets) == pytest.approx(expected, abs=1e-12)

    code, out, _ = cli("export", trained, "--format", format, "--out", file, "--no-normalise", "--overwrite")
    assert (code, "inputs: float32 [batch, 1, 8, 8], normalised: (x / 255 - mean)" in out) == (0, True), out
    assert accuracy(file, images, test.targets) == pytest.approx(expected, abs=1e-12)
    assert accuracy(file, test.inputs / 255, test.targets) < expected - 0.02


def test_safetensors_record_the_preprocessing(cli, tmp_path, trained):
    train, test = data.load("digits")
    assert cli("export", trained, "--out", "m.safetensors")[0] == 0
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        entry = json.loads(file.metadata()["preprocessing"])
    numbers = {"mean": list(train.mean), "std": list(train.std), "scale": 255}
    assert entry == {**numbers, "dtype": "uint8", "shape": [1, 8, 8], "classes": 10}
    code, out, _ = cli("export", "m.safetensors", "--format", "onnx", "--json")
    assert (code, json.loads(out)["normalises"]) == (0, True)
    found = accuracy(tmp_path / "m.onnx", test.inputs, test.targets)
    assert found == pytest.approx(read_run(trained).accuracy, abs=1e-12)

    assert cli("export", trained, "--out", "bare.safetensors", "--no-normalise")[0] == 0
    with safe_open(tmp_path / "bare.safetensors", "pt") as file:
        assert "preprocessing" not in file.metadata()


def test_an_older_folder_takes_the_normalisation_from_its_data_set(cli, tmp_path, trained, older):
    for folder, name in ((trained, "new.pt2"), (older, "old.pt2")):
        code, out, _ = cli("export", folder, "--format", "pt2", "--out", name, "--json")
        assert (code, json.loads(out)["normalises"], json.loads(out)["note"]) == (0, True, None)
    _, test = data.load("digits")
    new, old = (torch.export.load(tmp_path / name).module()(test.inputs) for name in ("new.pt2", "old.pt2"))
    assert torch.equal(new, old)


@pytest.mark.parametrize("found", ["nothing", "other examples"])
def test_an_older_folder_without_its_data_set_is_exported_bare(cli, tmp_path, monkeypatch, older, found):
    reason = {"nothing": "no files", "other examples": "its examples are not those of the run"}[found]
    if found == "nothing":
        monkeypatch.setattr(data, "load", Mock(side_effect=DataError(reason)))
    else:
        (older / "data.json").write_text('{"blake2b": "0"}')
    code, out, _ = cli("export", "run", "--format", "onnx")
    assert code == 0
    assert "inputs: float32 [batch, 1, 8, 8], prepared as for training." in out
    assert "run does not record how its inputs were normalised, and digits cannot be used" in out
    assert f"({reason}): the file is the bare network and takes normalised inputs." in out.replace(
        "DataError: ", ""
    )
    code, out, _ = cli("export", "run", "--format", "onnx", "--json", "--overwrite")
    assert (code, reason in json.loads(out)["note"]) == (0, True)


def test_an_older_folder_calls_no_function_that_its_config_names(cli, tmp_path, older, monkeypatch):
    monkeypatch.setattr(export_source, "read_config", lambda path: replace(read_config(path), dataset=OWN))
    monkeypatch.setattr(export_source, "final_checkpoint", lambda path: newest)
    newest = final_checkpoint(older)
    (tmp_path / "theirs_named.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    code, out, err = cli("export", "run", "--format", "pt2")
    assert (code, "export calls no function that a file names" in out) == (0, True), err
    assert not (tmp_path / "imported").exists()


def test_token_ids_are_not_normalised(cli, tmp_path, monkeypatch):
    """Texts of eight characters: the graph has every step of the recurrence."""
    load = data.load
    monkeypatch.setattr(
        data, "load", lambda *given: [replace(part, inputs=part.inputs[:, :8]) for part in load(*given)]
    )
    fields = {"dataset": "generated:shakespeare", "split": "owner", "clients": 12, "cohort": 2}
    run(
        Experiment(**fields, model="lstm-tiny", scheme="original", rounds=1, epochs=None, steps=1),
        tmp_path / "run",
    )
    file = tmp_path / "run" / "model.json"
    described = json.loads(file.read_text())
    assert described.pop("normalise") is None
    for _ in range(2):
        code, out, _ = cli("export", "run", "--format", "pt2", "--overwrite")
        assert (code, "inputs: int64 [batch, 8], raw. The data set needs no" in out) == (0, True), out
        file.write_text(json.dumps(described))  # as an earlier version wrote it


@pytest.mark.parametrize(
    ("words", "names"),
    [(["--shape", "3,3"], "--shape"), (["--model", "mlp", "--classes", "10"], "--model and --classes")],
)
def test_a_run_folder_describes_its_own_model(cli, tmp_path, words, names):
    run(Experiment(**PLAIN, rounds=1), tmp_path / "run")
    before = contents(tmp_path)
    code, out, err = cli("export", "run", *words)
    assert (code, out) == (2, "")
    assert f"run does not take {names}: a run folder takes --client" in err
    assert contents(tmp_path) == before


def test_safetensors_of_an_own_model_take_images_of_the_runs_shape(cli, tmp_path):
    own = "fedpara.models:mlp(inputs=64, hidden=16, layers=1)"
    run(Experiment(**{**PLAIN, "model": own}, rounds=1), tmp_path / "run")
    code, out, _ = cli("export", "run")
    assert (code, "inputs: float32 [batch, 1, 8, 8], normalised: (x / 255 - mean)" in out) == (0, True), out


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_out_must_not_be_a_folder(cli, tmp_path, more):
    run(Experiment(**PLAIN, rounds=1), tmp_path / "run")
    (tmp_path / "models").mkdir()
    code, _, err = cli("export", "run", "--format", "pt2", "--out", "models", *more)
    assert code == 2
    assert "models exists" in err or "models is not a place for a file" in err
    assert list((tmp_path / "models").iterdir()) == []


def test_no_file_of_a_run_is_replaced(cli, tmp_path):
    run(Experiment(**TINY, scheme="pfedpara", rounds=2), tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    before = contents(tmp_path / "run")
    kept = next((tmp_path / "run" / "clients").rglob("*.safetensors"))
    own = [f"run/{path.name}" for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert "run/checkpoint.safetensors" in own
    for name in (*own, "link/config.toml", "run/nodes.txt", "run/clients/new.safetensors", kept):
        code, _, err = cli("export", "run", "--client", 0, "--out", name, "--overwrite")
        assert (code, "belongs to the run" in " ".join(err.split())) == (2, True), (name, err)
    assert contents(tmp_path / "run") == before
    for _ in range(2):
        assert cli("export", "run", "--client", 0, "--out", "run/mine.safetensors", "--overwrite")[0] == 0


def test_sources_that_cannot_be_exported(cli, tmp_path):
    run(Experiment(**PLAIN, rounds=1), tmp_path / "run")
    for arguments, code, says in (
        (["nowhere"], 2, "does not exist"),
        (["run", "--format", "tflite"], 2, "unknown format 'tflite'"),
        ([tmp_path], 2, "not a run folder"),
        ([tmp_path / "run" / "config.toml"], 1, "safetensors file"),
    ):
        found, _, err = cli("export", *arguments)
        assert (found, says in err) == (code, True), err


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"name": "mlp", "classes": "x", "shape": [64]}',
        f'{{"name": "mlp", "classes": 10, "shape": [1, 8, {10**12}]}}',
        f'{{"name": "mlp", "classes": 10, "shape": [1, 8, {10**400}]}}',
        '{"name": "mlp", "classes": 10, "shape": [1, 8, 8], "normalise": {"mean": [0.5]}}',
        '{"name": "mlp", "classes": 10, "shape": [1, 8, 8], "normalise": [1]}',
        None,
    ],
    ids=["empty", "list", "classes", "huge", "overflow", "std", "normalise", "missing"],
)
def test_a_damaged_model_file_is_named(cli, tmp_path, text):
    run(Experiment(**PLAIN, rounds=1), tmp_path / "run")
    file = tmp_path / "run" / "model.json"
    file.unlink() if text is None else file.write_text(text)
    code, _, err = cli("export", "run")
    assert (code, "model.json does not describe the run's network" in err) == (1, True), err


def test_missing_and_damaged_checkpoints_are_told_apart(cli, tmp_path):
    run(Experiment(**PLAIN, rounds=2), tmp_path / "run")
    for name in CHECKPOINTS:
        (tmp_path / "run" / name).write_bytes(b"garbage")
    code, _, err = cli("export", "run")
    assert (code, "first round" in err) == (1, False)
    for name in CHECKPOINTS:
        assert f"run/{name} cannot be read" in err
        (tmp_path / "run" / name).unlink()
    code, _, err = cli("export", "run")
    assert (code, "no readable checkpoint" in err) == (1, True)


def test_a_checkpoint_of_another_config_is_not_exported(cli, tmp_path):
    """With tanh the same tensors are another model, and the file would not show it."""
    run(Experiment(**TINY, scheme="fedpara", rounds=1), tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text('nonlinearity = "tanh"\n' + config.read_text())
    code, _, err = cli("export", "run")
    assert (code, "another config" in err) == (1, True), err
    assert not (tmp_path / "run" / "model.merged.safetensors").exists()


def test_an_older_checkpoint_does_not_replace_a_damaged_newest_one(cli, tmp_path):
    run(Experiment(**TINY, scheme="pfedpara", rounds=3), tmp_path / "run")
    newest = tmp_path / "run" / "checkpoint.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    code, _, err = cli("export", "run", "--client", 0)
    assert code == 1
    assert "`fedpara resume run`" in " ".join(err.split())
    assert cli("resume", "run")[0] == 0
    assert cli("export", "run", "--client", 0)[0] == 0
