"""The README's code and commands work as printed."""

import os
import re
from pathlib import Path

import pytest

from fedpara.data import status

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
DATA = os.environ.get("FEDPARA_DATA")


def test_its_blocks_are_found():
    assert len(BLOCKS) == README.count("```python") == 2


@pytest.mark.parametrize("block", BLOCKS, ids=["factorize", "simulate"])
def test_its_python_runs(block):
    exec(compile(block, "README.md", "exec"), {})


def commands(pattern):
    """The arguments of the README's shell lines that match, without comments."""
    lines = re.findall(rf"^    (fedpara {pattern}.*)$", README, re.MULTILINE)
    return [line.partition("#")[0].split()[1:] for line in lines]


@pytest.mark.data
def test_what_it_runs_on_mnist_does_not_diverge(cli):
    if not DATA or not status("mnist", DATA).present:
        pytest.skip("MNIST is not available: set FEDPARA_DATA to a folder that has it")
    (started,) = commands("run .*--out runs/one")
    code, _, err = cli(*started, "--rounds", "2", "--data-dir", DATA)
    assert code == 0, err


def test_what_it_runs_it_can_export(cli, tmp_path):
    """Uses digits, because MNIST is not always available. Clients and cohorts are the same."""
    (started,) = commands("run .*--out runs/one")
    (exported,) = commands("export runs/one")
    assert started[1:3] == ["--dataset", "mnist"]
    assert cli("run", "--dataset", "digits", *started[3:])[0] == 0
    code, _, err = cli(*exported)
    assert code == 0, err
    assert [path.name for path in (tmp_path / "runs" / "one").glob("*.onnx")] == ["model-client-0.onnx"]
