"""`fedpara export` of a .safetensors state, with and without --model."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedpara import models
from fedpara.experiments import Experiment, run
from fedpara.interop import save_state

TINY = {"model": "mlp", "clients": 2, "cohort": 2, "epochs": None, "steps": 1}
NETWORK = "from torch import nn\ndef build():\n    return nn.Linear(3, 2)\n"


def contents(folder):
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: content for path, content in files.items() if path.suffix != ".pyc"}


@pytest.mark.parametrize("scheme", ["original", "pfedpara"])
def test_a_file_of_a_run_folder_is_not_a_state(cli, tmp_path, scheme):
    run(Experiment(**TINY, scheme=scheme, algorithm="scaffold", rounds=2), tmp_path / "run")
    (kept, *_) = (tmp_path / "run" / "clients").rglob("*.safetensors")
    before = contents(tmp_path)
    for path in (
        tmp_path / "run" / "checkpoint.safetensors",
        tmp_path / "run" / "checkpoint.previous.safetensors",
        kept,
    ):
        code, _, err = cli("export", path)
        assert code == 1
        assert "Export the run" in " ".join(err.split())
    assert contents(tmp_path) == before


@pytest.mark.parametrize("format", ["safetensors", "pt2"])
def test_a_state_of_another_model_is_rejected(cli, tmp_path, format):
    save_file({"a": torch.zeros(3)}, tmp_path / "foreign.safetensors")
    (tmp_path / "theirs_too.py").write_text(NETWORK)
    before = contents(tmp_path)
    for model, missing in (
        ("mlp", "fc1.weight, fc1.bias, fc2.weight, fc2.bias"),
        ("theirs_too:build", "weight, bias"),
    ):
        words = ["--format", format, "--model", model, *["--shape", "3"] * (":" in model)]
        code, out, err = cli("export", "foreign.safetensors", *words)
        assert (code, out) == (1, "")
        assert f"the state does not fit the model {model}" in err
        assert f"missing: {missing}" in err
    assert contents(tmp_path) == before


def test_shape_and_classes_describe_a_library_model(cli, tmp_path):
    save_file(models.mlp(64, classes=10).state_dict(), tmp_path / "small.safetensors")
    code, _, err = cli("export", "small.safetensors", "--model", "mlp")
    assert code == 1
    assert "fc1.weight (256, 64)" in err
    assert "(256, 784)" in err
    assert cli("export", "small.safetensors", "--model", "mlp", "--shape", "1,8,8")[0] == 0
    code, _, err = cli(
        "export", "small.safetensors", "--model", "mlp", "--shape", "1,8,8", "--classes", 3, "--overwrite"
    )
    assert (code, "fc2.weight (10, 256)" in err, "(3, 256)" in err) == (1, True, True)


def test_the_output_says_which_check_was_made(cli, tmp_path):
    save_file(models.mlp(64, classes=10).state_dict(), tmp_path / "mine.safetensors")
    code, out, _ = cli("export", "mine.safetensors", "--out", "again.safetensors")
    assert (code, "torch" in out, "verified: the file holds exactly the tensors" in out) == (0, False, True)
    code, out, _ = cli("export", "mine.safetensors", "--out", "b.safetensors", "--json")
    assert (code, json.loads(out)["max_difference"]) == (0, None)
    words = ["--model", "mlp", "--shape", "1,8,8", "--format", "pt2"]
    assert "checked against torch: largest output difference" in cli("export", "mine.safetensors", *words)[1]


def test_shape_and_classes_need_a_model(cli, tmp_path):
    save_file({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    (tmp_path / "theirs_too.py").write_text(NETWORK)
    code, _, err = cli("export", "a.safetensors", "--shape", "3", "--classes", 2)
    assert (code, "a.safetensors does not take --classes and --shape: " in err) == (2, True)
    code, _, err = cli("export", "a.safetensors", "--model", "theirs_too:build", "--shape", "a,b")
    assert (code, "--shape 'a,b': expected whole numbers" in err) == (2, True)
    assert cli("export", "a.safetensors", "--model", "theirs_too:build")[0] == 0


HOSTILE = """
from pathlib import Path
from torch import nn

Path(__file__).with_name("imported").touch()

def build():
    Path(__file__).with_name("called").touch()
    return nn.Linear(3, 2)
"""


@pytest.mark.parametrize("format", ["safetensors", "onnx", "pt2"])
def test_code_that_only_the_file_names_is_not_run(cli, tmp_path, monkeypatch, format):
    """Attack: someone sends a state that names a module Python can find."""
    name = f"hostile_{format}"
    (tmp_path / f"{name}.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = {"target": f"{name}:build", "shape": [3]}
    save_state(tmp_path / "sent.safetensors", nn.Linear(3, 2).state_dict(), {}, model=model)
    words = ("export", "sent.safetensors", "--format", format, "--out", f"out.{format}")
    code, _, err = cli(*words)
    if format == "safetensors":  # needs no network
        assert code == 0
    else:
        assert code == 2
        assert f"names '{name}:build' as its model" in err
        assert f"pass --model {name}:build if you trust it" in err
        assert not (tmp_path / f"out.{format}").exists()
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "called").exists()
    code, _, err = cli(*words, "--model", f"{name}:build", "--shape", "3", "--overwrite")
    assert code == 0, err
    assert (tmp_path / "called").exists()
