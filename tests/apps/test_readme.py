"""The README's examples work exactly as printed."""

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
"""Blocks that cannot run everywhere: first line and what they need. Currently none."""


class Network(nn.Module):
    """A user's model, for the lines that start from one."""

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


def test_every_python_block_is_found():
    assert len(BLOCKS) == README.count("```python") == 2
    assert set(CANNOT_RUN) <= set(map(first_line, BLOCKS))


@pytest.mark.parametrize("block", [b for b in BLOCKS if first_line(b) not in CANNOT_RUN], ids=first_line)
def test_python_blocks_run(block):
    """Line by line. If the block does not build a model, each line gets a fresh one."""
    statements = ast.parse(block).body
    own = any("model" in assigned(statement) for statement in statements)
    names = {"fp": fp, "models": models}
    for statement in statements:
        if not own:
            names["model"] = Network()
        exec(compile(ast.Module([statement], []), "README.md", "exec"), names)


def commands(pattern):
    """The README's matching shell commands, without comments."""
    lines = re.findall(rf"^    (fedpara {pattern}.*)$", README, re.MULTILINE)
    return [line.partition("#")[0].split()[1:] for line in lines]


@pytest.mark.data
def test_the_mnist_run_does_not_diverge(cli):
    if not DATA or not status("mnist", DATA).present:
        pytest.skip("mnist is missing: set FEDPARA_DATA to a folder that contains it")
    (started,) = commands("run .*--out runs/one")
    code, _, err = cli(*started, "--rounds", "2", "--data-dir", DATA)
    assert code == 0, err


def test_the_export_command_fits_the_run(cli, tmp_path):
    """On digits, because MNIST may be missing. Clients and cohorts are the same."""
    (started,) = commands("run .*--out runs/one")
    (exported,) = commands("export runs/one")
    assert started[1:3] == ["--dataset", "mnist"]
    assert cli("run", "--dataset", "digits", *started[3:])[0] == 0
    code, _, err = cli(*exported)
    assert code == 0, err
    assert [path.name for path in (tmp_path / "runs" / "one").glob("*.onnx")] == ["model-client-0.onnx"]
