"""Contract: with a user's code, Flower's simulator gives the sequential engine's results."""

import os

import pytest
from flower_nodes import log, run_sequentially, same_results
from own_code import fields, forget, write_package
from typer.testing import CliRunner

from fedpara.apps.cli import app
from fedpara.experiments import Experiment
from fedpara.experiments.run import lay_out

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
pytest.importorskip("ray", reason="Flower's simulator is not installed: pip install '.[flower]'")

PACKAGE = Experiment(**fields("sites"), clients=4, cohort=2, rounds=2, batch_size=16, gamma=0.0, lr=0.05)
SEEN = "import os\nwith open(os.environ['SEEN'], 'a') as file:\n    print(os.getpid(), __file__, file=file)\n"


@pytest.fixture
def own(tutorials, tmp_path, monkeypatch):
    """The experiments of the tutorials, and one with a package that notes who imports it and from where."""
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.txt"))
    write_package(tmp_path, "sites")
    (tmp_path / "helping_sites.py").write_text(f"{SEEN}COUNT = 200\n")
    yield {"package": PACKAGE, **{tutorial.name: tutorial.experiment() for tutorial in tutorials}}
    forget("sites")


def test_the_simulator_equals_the_sequential_engine_bit_for_bit(own, tmp_path):
    """All in a single simulation, because starting Flower and Ray takes longer than the rounds."""
    for name, experiment in own.items():
        lay_out(experiment, tmp_path / "simulated" / name)
    done = CliRunner().invoke(app, ["resume", "simulated", "--engine", "flower"])
    assert done.exit_code == 0, done.output
    for name, experiment in own.items():
        run_sequentially(experiment, tmp_path / "here" / name)
        assert same_results(tmp_path / "here" / name, tmp_path / "simulated" / name), name
        assert "engine flower" in log(tmp_path / "simulated" / name)
    imported = [line.split() for line in (tmp_path / "seen.txt").read_text().splitlines()]
    elsewhere = [file for process, file in imported if int(process) != os.getpid()]
    assert len(elsewhere) >= 2, "the server and a node"
    assert not [file for file in elsewhere if file.startswith(str(tmp_path))], (
        "they import the copy in the app"
    )
