"""Contracts of two more tutorials, a language model and adapters: every engine gives the same run, and runs resume."""

import importlib
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from flower_nodes import Nodes, run_on_nodes, run_sequentially, same_results
from typer.testing import CliRunner

import fedpara as fp
from fedpara import algorithms, data
from fedpara.apps.cli import app
from fedpara.experiments import Experiment, read_run, resume
from fedpara.experiments.run import lay_out

ROOT = Path(__file__).parents[2]
COMMON = {"clients": 4, "cohort": 2, "rounds": 3, "batch_size": 4, "steps": 3, "optimizer": "adamw"}
EXPERIMENTS = {
    "language_model": {
        "dataset": "language_model:load(clients=4, documents=6)",
        "model": "language_model:Transformer(width=16)",
        "loss": "next-token",
        "metrics": "perplexity",
        "schedule": "cosine(warmup=1)",
        "lr": 0.01,
    },
    "adapters": {
        "dataset": "digits",
        "model": "adapters:pretrained",
        "rank": 4,
        "onto": "frozen",
        "train": "classifier",
        "lr": 0.02,
    },
}


@pytest.fixture(params=EXPERIMENTS)
def name(request, tmp_path, monkeypatch):
    """The name of a tutorial, whose module is in the working directory."""
    for script in EXPERIMENTS:
        shutil.copy(ROOT / "examples" / f"{script}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield request.param
    for script in EXPERIMENTS:
        sys.modules.pop(script, None)


def experiment(name, **changes):
    return Experiment(**COMMON | EXPERIMENTS[name] | changes)


def task_and_data(name):
    module = importlib.import_module(name)
    torch.manual_seed(0)
    if name == "language_model":
        model = fp.factorize(module.Transformer(width=16), fp.FedPara(gamma=0.3))
        task = fp.Task(model, loss="next-token", metrics=["perplexity"])
        return task, module.load(clients=4, documents=6)
    train, test = data.load("digits")
    model = fp.factorize(module.pretrained(), fp.FedPara(rank=4), onto="frozen", train=("classifier",))
    return fp.Task(model, test=test), fp.FederatedData(train, data.dirichlet(train.targets, 4, 0.5, seed=0))


def test_the_batched_engine_equals_the_sequential_one_within_rounding(name):
    runs = []
    for engine in ("sequential", "batched"):
        task, clients = task_and_data(name)
        algorithm = algorithms.fedavg(
            lr=3e-3, optimizer="adamw", schedule=fp.cosine(warmup=1), steps=3, batch_size=4
        )
        runs.append(fp.simulate(task, clients, algorithm, rounds=2, cohort=3, engine=engine))
        assert runs[-1].engine.startswith(engine)
    first, second = (run.rounds[-1].scores for run in runs)
    assert first == pytest.approx(second, rel=2e-3)
    assert runs[0].bytes == runs[1].bytes
    for key, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[key], rtol=1e-3, atol=1e-4)


def test_flower_equals_the_sequential_engine_bit_for_bit(name, tmp_path):
    run_sequentially(experiment(name), tmp_path / "here")
    run_on_nodes(experiment(name), tmp_path / "there", Nodes(tmp_path / "nodes", count=2))
    assert same_results(tmp_path / "here", tmp_path / "there")


class Killed(Exception):
    pass


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_killed_run_resumes_to_the_same_bits_and_is_exported(name, engine, tmp_path):
    def kill(result, timing):
        if result.number == 2:
            raise Killed

    lay_out(experiment(name, engine=engine), tmp_path / "runs" / "whole")
    resume(tmp_path / "runs" / "whole")
    lay_out(experiment(name, engine=engine), tmp_path / "runs" / "killed")
    with pytest.raises(Killed):
        resume(tmp_path / "runs" / "killed", on_round=kill)
    resume(tmp_path / "runs" / "killed")
    assert same_results(tmp_path / "runs" / "whole", tmp_path / "runs" / "killed")
    assert len(read_run(tmp_path / "runs" / "killed").metrics) == 3
    for line in (
        ["report", "runs", "--out", "page.html"],
        ["export", "runs/killed", "--out", "model.safetensors", "--model", EXPERIMENTS[name]["model"]],
    ):
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", ["language_model"], indirect=True)
def test_padding_does_not_count(name):
    """The uniform model has the size of the vocabulary as its perplexity, on documents of every length."""
    module = importlib.import_module(name)
    test = module.load(clients=3, documents=2).test
    uniform = torch.zeros(len(test), module.LENGTH, len(module.VOCABULARY))
    from fedpara.tasks.losses import mean_loss, next_token

    assert math.exp(mean_loss(next_token(uniform, test.targets))) == pytest.approx(len(module.VOCABULARY))
    assert len({int(n) for n in (test.targets >= 0).sum(1)}) == 5


@pytest.mark.parametrize("name", ["adapters"], indirect=True)
def test_the_base_is_the_same_whatever_was_drawn_before(name):
    """Both ends must have the same base, and each of them may have drawn numbers."""
    module = importlib.import_module(name)
    torch.manual_seed(1)
    first = module.pretrained().state_dict()
    module.weights.cache_clear()
    torch.rand(3)
    again = module.pretrained().state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
