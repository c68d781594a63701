"""Contract: Flower equals the sequential engine, bit for bit, with another loss, metrics, optimizer and schedule."""

import sys

import pytest
from flower_nodes import run_on_nodes, run_sequentially, same_results
from own_task import FIELDS, NAME, write_module

from fedpara.apps.flower.run_config import config_of, defaults, read
from fedpara.experiments import Experiment
from fedpara.experiments.storage.summary import read_metric


@pytest.fixture
def module(tmp_path, monkeypatch):
    write_module(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"keep_optimizer": True},
        {
            "loss": "tabular:huber",
            "metrics": "tabular:worst, tabular:within(k=1)",
            "sampler": "tabular:first",
        },
        {"optimizer": "tabular:signs", "schedule": "tabular:halving"},
        {"scheme": "lowrank", "rank": 2, "onto": "frozen", "train": "2", "schedule": "linear(within=True)"},
    ],
    ids=["library", "kept", "functions", "optimizer", "adapters"],
)
def test_flower_equals_the_sequential_engine(module, tmp_path, changes):
    experiment = Experiment(**{**FIELDS, **changes})
    run_sequentially(experiment, tmp_path / "here")
    run_on_nodes(experiment, tmp_path / "there")
    assert same_results(tmp_path / "here", tmp_path / "there")
    assert read_metric(tmp_path / "there").name == ("worst" if "metrics" in changes else "r2")


def test_the_run_config_holds_every_field():
    fields = {**FIELDS, "keep_optimizer": True, "sampler": f"{NAME}:first"}
    config = {**defaults(), **config_of(Experiment(**fields)), "out": "runs/x"}
    (experiment,) = read(config).experiments().values()
    assert experiment == Experiment(**fields, engine="flower")
