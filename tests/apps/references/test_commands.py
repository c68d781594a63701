"""The command line with the user's own model, data, split, rule and algorithm."""

import json
import re
import shlex
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from own_code import fields, forget, write_package
from safetensors.torch import load_file

from fedpara import data
from fedpara.experiments import read_run
from fedpara.experiments.storage.checkpoint import final_checkpoint

NAME = "ours"
NAMED = [
    word
    for name, value in fields(NAME).items()
    for word in (["--option", "mu=0.8"] if name == "options" else [f"--{name}", value])
]
TINY = ["--clients", 4, "--cohort", 2, "--batch-size", 16, "--gamma", 0, "--engine", "sequential"]


@pytest.fixture
def own(tmp_path):
    write_package(tmp_path, NAME)
    yield tmp_path
    forget(NAME)


@pytest.fixture
def finished(cli, own):
    code, _, err = cli("run", *NAMED, *TINY, "--rounds", 2, "--out", "run")
    assert code == 0, err
    forget(NAME)
    return own


def test_run_resume_and_report(cli, finished):
    code, _, err = cli("resume", "run", "--rounds", 3)
    assert code == 0, err
    assert cli("run", *NAMED, *TINY, "--rounds", 3, "--out", "whole")[0] == 0
    same = [(finished / name / "metrics.jsonl").read_bytes() for name in ("run", "whole")]
    assert same[0] == same[1]

    forget(NAME)
    (finished / NAME).rename(finished / "moved")
    code, _, err = cli("resume", "run", "--rounds", 4)
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be imported (ModuleNotFoundError: No module named 'ours'): looked in " in err
    code, _, err = cli("report", "run", "--out", "page.html")
    assert code == 0, err


def test_a_config_and_a_changed_source(cli, own):
    lines = [f'{name} = "{value}"' for name, value in fields(NAME).items() if name != "options"]
    (own / "mine.toml").write_text("\n".join([*lines, "clients = 4", "cohort = 2", "rounds = 1"]))
    assert cli("run", "--config", "mine.toml", "--out", "run")[0] == 0
    forget(NAME)
    (own / f"helping_{NAME}.py").write_text("COUNT = 200  # as before\n")
    code, _, err = cli("resume", "run", "--rounds", 2)
    assert code == 0, err
    says = "helping_ours.py changed since the run began: the next rounds use the new code."
    assert says in " ".join(err.split())
    (own / "mine.toml").write_text('rounds = 1\nmodel = "ours:net(width"\n')
    code, _, err = cli("run", "--config", "mine.toml", "--out", "other")
    assert (code, "mine.toml, line 2: model is 'ours:net(width': expected" in " ".join(err.split())) == (
        2,
        True,
    )


def test_safetensors_are_exported_without_importing_the_model(cli, finished):
    (finished / NAME).rename(finished / "moved")
    code, out, err = cli("export", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["preprocessing"]["dtype"] == "uint8"
    (finished / "moved").rename(finished / NAME)
    from ours import net

    model = net(10, (1, 8, 8), width=12)
    model.load_state_dict(load_file(finished / "run" / "model.merged.safetensors"))
    _, test = data.load("digits")
    test = test.subset(range(100))
    logits = model(data.normalise(test.inputs, test.mean, test.std))
    accuracy = float((logits.argmax(1) == test.targets).double().mean())
    assert accuracy == pytest.approx(read_run(finished / "run").accuracy)


def test_a_graph_needs_the_model_that_the_user_names(cli, finished):
    code, _, err = cli("export", "run", "--format", "onnx")
    assert code == 2
    assert "pass --model 'ours:net(width=12)' if you trust it" in err
    assert NAME not in sys.modules
    code, _, err = cli("export", "run", "--format", "onnx", "--model", "ours:net(width=12)")
    assert code == 0, err
    _, test = data.load("digits")
    session = onnxruntime.InferenceSession(str(finished / "run" / "model.onnx"))
    (logits,) = session.run(None, {session.get_inputs()[0].name: test.inputs[:100].numpy()})
    accuracy = float((torch.from_numpy(logits).argmax(1) == test.targets[:100]).double().mean())
    assert accuracy == pytest.approx(read_run(finished / "run").accuracy)
    code, _, err = cli(
        "export", "run", "--format", "onnx", "--model", "ours:net(width=13)", "--out", "b.onnx"
    )
    assert code == 1
    assert "does not fit" in err


HALVES = """
import fedpara as fp
import torch
from torch import nn

class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(5, 6), nn.Linear(6, 8), nn.Linear(4, 8)

    def forward(self, ids, values, scale=None):
        return (self.a(self.words(ids).mean(1)) + self.b(values)).relu()

def net():
    return Halves()

def unnamed():
    model = Halves()
    model.forward = lambda **inputs: Halves.forward(model, **inputs)
    return model

def data():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, (80, 3), generator=generator)
    inputs = {"values": torch.randn(80, 4, generator=generator), "ids": ids}
    made = fp.Examples(inputs, ids[:, 0], 8)
    return made, made
"""


def test_a_graph_of_several_inputs(cli, tmp_path):
    (tmp_path / "halves.py").write_text(HALVES)
    words = ("--dataset", "halves:data", "--model", "halves:net", "--scheme", "original", "--clients", 4)
    code, _, err = cli("run", *words, "--cohort", 2, "--rounds", 1, "--out", "run")
    assert code == 0, err
    described = json.loads((tmp_path / "run" / "model.json").read_text())
    assert described["inputs"] == {"values": "float32 [4]", "ids": "int64 [3]"}
    code, out, err = cli("export", "run", "--format", "onnx", "--model", "halves:net")
    assert code == 0, err
    assert "inputs: int64 [batch, 3] and float32 [batch, 4], raw." in out
    session = onnxruntime.InferenceSession(str(tmp_path / "run" / "model.onnx"))
    assert [one.name for one in session.get_inputs()] == ["ids", "values"]
    (_, test), network = sys.modules["halves"].data(), sys.modules["halves"].net()
    network.load_state_dict(final_checkpoint(tmp_path / "run").state)
    (logits,) = session.run(None, {name: tensor.numpy() for name, tensor in test.inputs.items()})
    torch.testing.assert_close(torch.from_numpy(logits), network(**test.inputs).detach())
    code, out, err = cli("export", "run", "--format", "safetensors")
    assert "inputs: float32 [batch, 4] and int64 [batch, 3], raw." in out, err
    code, _, err = cli("export", "run", "--format", "pt2", "--model", "halves:unnamed")
    assert (code, "in Python, pass `example` to `export`" in err) == (2, True)


def test_frozen_weights_come_from_the_model(cli, own):
    frozen = ["--model", "ours.networks:frozen", "--scheme", "original", "--clients", 2, "--cohort", 2]
    assert cli("run", *frozen, "--rounds", 1, "--seed", 3, "--out", "run")[0] == 0
    assert "3.weight" not in final_checkpoint(own / "run").state
    code, _, err = cli("export", "run")
    assert code == 2
    assert "does not hold the frozen tensor '3.weight': pass --model ours.networks:frozen if you trust" in err
    assert cli("export", "run", "--model", "ours.networks:frozen")[0] == 0
    from ours.networks import frozen as build

    torch.manual_seed(3)
    exported = load_file(own / "run" / "model.merged.safetensors")
    assert torch.equal(exported["3.weight"], build(10)[3].weight)


def test_a_client_of_a_personal_run(cli, own):
    words = ["--model", "ours:net", "--scheme", "pfedpara", "--personal", "--clients", 2, "--cohort", 2]
    assert cli("run", *words, "--gamma", 0, "--rounds", 1, "--out", "run")[0] == 0
    forget(NAME)
    (own / NAME).rename(own / "moved")
    assert cli("export", "run")[0] == 2
    code, _, err = cli("export", "run", "--client", 1)
    assert code == 0, err
    assert load_file(own / "run" / "model-client-1.merged.safetensors")["1.weight"].shape == (16, 64)


def test_a_sweep_over_models(cli, own):
    grid = ["--set", "model=ours:net(width=8), ours.networks:net( width = 4 )", "--set", "clients=4"]
    grid += ["--set", "cohort=2", "--set", "rounds=1", "--set", "scheme=original"]
    code, out, err = cli("sweep", *grid, "--json")
    assert code == 0, err
    settings = json.loads(out)["settings"]
    assert {row["values"]["model"] for row in settings} == {
        "ours:net(width=8)",
        "ours.networks:net( width = 4 )",
    }
    assert len({path for row in settings for path in row["runs"]}) == 2
    code, again, _ = cli("sweep", *grid, "--json")
    assert (code, json.loads(again)) == (0, json.loads(out))


def test_the_guide(cli, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "guides" / "your-code.md").read_text()
    source, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "mypkg.py").write_text(source)
    command, *_ = re.findall(
        r"^\$ fedpara (run --dataset .*?--out runs/mine)$", page, re.MULTILINE | re.DOTALL
    )
    code, _, err = cli(*shlex.split(command.replace("\\\n", " ")), "--rounds", 2)
    assert code == 0, err
    exports = re.findall(r"^\$ fedpara (export .*?) *#", page, re.MULTILINE)
    assert [cli(*shlex.split(words))[0] for words in exports] == [0, 0]


@pytest.mark.parametrize(
    "words", [["--model", "ours:nett"], ["--dataset", "nowhere:load"], ["--split", "ours:net"]]
)
def test_mistakes_leave_no_folder(cli, own, words):
    code, out, err = cli("run", *words, *TINY, "--out", "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert not (own / "run").exists()
