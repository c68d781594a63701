"""A run folder of adapters: it records the base, resumes only on the same one, and exports the whole model."""

import json
from pathlib import Path

import pytest
import torch

import fedpara as fp
from fedpara import models
from fedpara.apps.export_source import read_run_or_state
from fedpara.errors import RunError
from fedpara.experiments import Experiment, resume, run
from fedpara.files import read_tensors
from fedpara.parameterization import forms

SHORT = Experiment(
    model="mlp", scheme="original", clients=6, cohort=2, rounds=2, epochs=None, steps=1, batch_size=8, lr=0.1
)


def adapters(plain, seed=5):
    def build(*arguments, **options):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return fp.factorize(plain(*arguments, **options), fp.FedPara(rank=2), onto="frozen", alpha=4)

    return build


@pytest.fixture
def plain():
    return models.build


def test_a_run_of_adapters_resumes_only_on_its_base(tmp_path: Path, monkeypatch, plain):
    monkeypatch.setattr(models, "build", adapters(plain))
    run(SHORT, tmp_path / "whole")
    run(Experiment(**{**vars(SHORT), "rounds": 1}), tmp_path / "a")
    assert len(json.loads((tmp_path / "a" / "model.json").read_text())["base"]) == 16
    checkpoint, _ = read_tensors(tmp_path / "a" / "checkpoint.safetensors")
    assert not [name for name in checkpoint if name.endswith(("base", "bias"))]

    with monkeypatch.context() as other:
        other.setattr(models, "build", adapters(plain, seed=6))
        with pytest.raises(
            RunError, match="was started on another base: the frozen weights of the model differ"
        ):
            resume(tmp_path / "a", rounds=2)
    resume(tmp_path / "a", rounds=2)
    ends = [read_tensors(tmp_path / name / "checkpoint.safetensors")[0] for name in ("whole", "a")]
    assert all(torch.equal(ends[1][name], tensor) for name, tensor in ends[0].items())


def test_an_export_holds_the_base(tmp_path: Path, monkeypatch, plain):
    monkeypatch.setattr(models, "build", adapters(plain))
    run(SHORT, tmp_path / "a")
    saved = read_run_or_state(tmp_path / "a").saved
    model = models.build("mlp", classes=10, shape=(1, 8, 8))
    assert saved.forms == forms(model)
    model.load_state_dict(saved.state)
    network = plain("mlp", classes=10, shape=(1, 8, 8))
    network.load_state_dict(saved.merged())
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(network(x), model(x))
    monkeypatch.setattr(models, "build", adapters(plain, seed=6))
    with pytest.raises(RunError, match="the frozen weights of the model are not those of the run"):
        read_run_or_state(tmp_path / "a")


def test_a_run_without_frozen_tensors_records_no_base(tmp_path: Path):
    run(SHORT, tmp_path / "a")
    assert "base" not in json.loads((tmp_path / "a" / "model.json").read_text())
