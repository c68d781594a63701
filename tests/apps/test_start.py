"""Startup: help, the version and mistyped options do not import torch."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys

import pytest

from fedpara import attacks, choices, data, models, parameterization, robust, tasks
from fedpara.apps import commands
from fedpara.experiments import Experiment

HEAVY = {"torch", "numpy", "sklearn", "safetensors", "matplotlib", "flwr"}
PROGRAM = """
import json, sys
from fedpara.apps.cli import main
try:
    main()
except SystemExit as end:
    tops = {name.partition(".")[0] for name in sys.modules}
    sys.stderr.write("\\n" + json.dumps([end.code, sorted(tops)]))
"""
COMMANDS = ("inspect", "run", "resume", "sweep", "reproduce", "report", "export", "data", "flower")


def start(*words):
    got = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    code, modules = json.loads(got.stderr.splitlines()[-1])
    return code, HEAVY & {*modules}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("--nonsense", 2),
        ("nonsense", 2),
        *((f"{command} --help", 0) for command in COMMANDS),
        ("flower up --help", 0),
        ("data verify --nonsense", 2),
        ("run --nonsense", 2),
        ("run --rounds many", 2),
    ],
)
def test_torch_is_not_imported(words, code):
    assert start(*words.split()) == (code, set())


def test_a_command_imports_torch_once_its_options_are_valid():
    code, heavy = start("inspect", "mlp")
    assert code == 0
    assert "torch" in heavy


def test_choices_equal_the_registries():
    assert [*choices.DATASETS] == data.names()
    assert [*choices.MODELS] == models.names()
    assert ("original", *parameterization.SCHEMES) == choices.SCHEMES
    assert (tuple(tasks.LOSSES), tuple(tasks.METRICS)) == (choices.LOSSES, choices.METRICS)
    assert (tuple(robust.DEFENCES), tuple(attacks.ATTACKS)) == (choices.DEFENCES, choices.ATTACKS)


def test_the_help_shows_the_defaults_of_an_experiment():
    fields = {f.name: f.default for f in dataclasses.fields(Experiment)}
    options = inspect.signature(commands.run).parameters.keys() & fields.keys()
    assert {
        name: v for name in options if (v := fields[name]) is not None and v is not False
    } == choices.DEFAULTS
    words = [sys.executable, "-m", "fedpara", "run", "--help"]
    got = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}).stdout
    assert all(f"[default:{value}]" in "".join(got.split()) for value in choices.DEFAULTS.values())


def test_ctrl_c_during_the_import_of_torch(tmp_path):
    """A fake torch raises KeyboardInterrupt on import; the real one takes seconds."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from fedpara_command import main; main()"
    got = subprocess.run(
        [sys.executable, "-c", code, "run", "--rounds", "1"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (got.returncode, got.stdout, got.stderr) == (130, "", "interrupted: nothing was started.\n")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["torch.py"]
