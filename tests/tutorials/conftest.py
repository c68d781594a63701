"""The six tutorials at small scale: the commands of their pages with fewer clients, examples and rounds."""

import importlib
import re
import shlex
import shutil
import sys
from ast import literal_eval
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

from fedpara.experiments import Experiment

ROOT = Path(__file__).parents[2]
SMALL = {
    "regression": {"dataset": "regression:load(clients=4)", "clients": 4},
    "segmentation": {"dataset": "segmentation:load(clients=3, images=5)", "clients": 3, "batch_size": 3},
    "larger_than_memory": {
        "dataset": "larger_than_memory:load(folder='sensors', clients=4)",
        "clients": 4,
        "steps": 4,
    },
    "language_model": {
        "dataset": "language_model:load(clients=4, documents=6)",
        "model": "language_model:Transformer(width=16)",
        "clients": 4,
        "batch_size": 4,
    },
    "adapters": {"clients": 4, "batch_size": 120},
    "own_algorithm": {"dataset": "own_algorithm:disputed(clients=4, count=200)", "clients": 4},
}


@dataclass(frozen=True)
class Tutorial:
    """A page, and its script as a module in `folder`."""

    name: str
    folder: Path

    @property
    def page(self) -> str:
        return (ROOT / "docs" / "tutorials" / f"{self.name}.md").read_text()

    @property
    def script(self) -> Path:
        return ROOT / "examples" / f"{self.name}.py"

    @property
    def module(self):
        return importlib.import_module(self.name)

    @cached_property
    def asked(self):
        """The experiment of the page's `fedpara run`."""
        words, fields = self.commands["run"], {}
        for option, value in zip(words[::2], words[1::2], strict=True):
            field = option.removeprefix("--").replace("-", "_")
            fields.setdefault(field, []).append(literal_eval(value) if value[0].isdigit() else value)
        options = dict(text.split("=") for text in fields.pop("option", []))
        metrics = ", ".join(fields.pop("metric", [])) or None
        known = {field: value for field, [value] in fields.items() if field != "out"}
        return Experiment(**known, metrics=metrics, options={k: float(v) for k, v in options.items()})

    @property
    def commands(self):
        """The words of each `fedpara` command of the page, by name."""
        lines = re.findall(r"^\$ fedpara (\w+) (.*)$", self.page.replace("\\\n", " "), re.MULTILINE)
        return {name: shlex.split(rest) for name, rest in lines}

    def experiment(self, **changes):
        return replace(self.asked, **{"cohort": 2, "rounds": 3} | SMALL[self.name] | changes)

    def write(self):
        """Copy the script, and write the data that it needs."""
        shutil.copy(self.script, self.folder / f"{self.name}.py")
        if self.name == "larger_than_memory":
            (self.folder / "sensors").mkdir()
            self.module.write(self.folder / "sensors", clients=4, rows=70)


def tutorial_in(folder, name, patch):
    patch.chdir(folder)
    patch.setattr(sys, "path", [str(folder), *sys.path])
    found = Tutorial(name, folder)
    found.write()
    return found


@pytest.fixture(params=SMALL)
def tutorial(request, tmp_path, monkeypatch):
    """One of the tutorials, in the working directory."""
    yield tutorial_in(tmp_path, request.param, monkeypatch)
    sys.modules.pop(request.param, None)


@pytest.fixture
def tutorials(tmp_path, monkeypatch):
    """All of them, in the working directory."""
    yield [tutorial_in(tmp_path, name, monkeypatch) for name in SMALL]
    for name in SMALL:
        sys.modules.pop(name, None)
