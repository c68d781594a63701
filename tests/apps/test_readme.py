"""What the README shows can be done as it stands there."""

import ast
import os
import re
from pathlib import Path

import pytest
from torch import nn

import fedpara as fp
from fedpara import models
from fedpara.data import status

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
DATA = os.environ.get("FEDPARA_DATA")

CANNOT_RUN: dict[str, str] = {}
"""The first line of a block that needs what is not everywhere, and what that is. None does."""


class Network(nn.Module):
    """Somebody's model, for the lines that begin with one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(32, 40)
        )
        self.head = nn.Linear(40, 30)


def first_line(block):
    return block.partition("\n")[0]


def assigned(statement):
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def test_its_blocks_are_found():
    assert len(BLOCKS) == README.count("```python") == 2
    assert set(CANNOT_RUN) <= set(map(first_line, BLOCKS))


@pytest.mark.parametrize("block", [b for b in BLOCKS if first_line(b) not in CANNOT_RUN], ids=first_line)
def test_its_python_runs(block):
    """Line by line; a block that makes no model of its own is given a fresh one for every line."""
    statements = ast.parse(block).body
    own = any("model" in assigned(statement) for statement in statements)
    names = {"fp": fp, "models": models}
    for statement in statements:
        if not own:
            names["model"] = Network()
        exec(compile(ast.Module([statement], []), "README.md", "exec"), names)


def commands(pattern):
    """The README's shell lines that match, without their comments."""
    lines = re.findall(rf"^    (fedpara {pattern}.*)$", README, re.MULTILINE)
    return [line.partition("#")[0].split()[1:] for line in lines]


@pytest.mark.data
def test_what_it_runs_on_mnist_does_not_diverge(cli):
    if not DATA or not status("mnist", DATA).present:
        pytest.skip("mnist is not there: set FEDPARA_DATA to a folder that has it")
    (started,) = commands("run .*--out runs/one")
    code, _, err = cli(*started, "--rounds", "2", "--data-dir", DATA)
    assert code == 0, err


def test_what_it_runs_it_can_export(cli, tmp_path):
    """On digits: MNIST is not everywhere. The clients and who takes part are the same."""
    (started,) = commands("run .*--out runs/one")
    (exported,) = commands("export runs/one")
    assert started[1:3] == ["--dataset", "mnist"]
    assert cli("run", "--dataset", "digits", *started[3:])[0] == 0
    code, _, err = cli(*exported)
    assert code == 0, err
    assert [path.name for path in (tmp_path / "runs" / "one").glob("*.onnx")] == ["model-client-0.onnx"]
