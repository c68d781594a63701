"""`fedpara run` with another loss, metrics, optimizer and schedule."""

import sys
from importlib import import_module

import pytest
import torch
from own_task import NAME, write_module
from safetensors.torch import load_file

import fedpara as fp
from fedpara import algorithms
from fedpara.experiments import read_run

RUN = [
    *["run", "--dataset", f"{NAME}:examples", "--split", "iid", "--clients", 4, "--cohort", 2, "--rounds", 2],
    *["--model", f"{NAME}:net(width=16)", "--scheme", "original", "--lr", 0.01, "--loss", "mse"],
]


@pytest.fixture
def module(tmp_path, monkeypatch):
    write_module(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop(NAME, None)


def test_a_regression_runs_resumes_and_is_reported_and_exported(cli, module):
    task = ["--metric", "r2", "--metric", f"{NAME}:within(k=0.5)", "--optimizer", "adamw(eps=1e-6)"]
    how = ["--schedule", "cosine(warmup=1, rounds=3)", "--keep-optimizer", "--out", "runs/one"]
    code, out, err = cli(*RUN, *task, *how)
    assert code == 0, err
    assert "r2" in out
    assert cli("resume", "runs/one", "--rounds", 3)[0] == 0
    summary = read_run(module / "runs/one")
    assert (summary.experiment.metrics, summary.experiment.keep_optimizer) == (
        f"r2, {NAME}:within(k=0.5)",
        True,
    )
    assert (summary.rounds, summary.metric.name) == (3, "r2")
    assert summary.metrics[-1]["scores"].keys() == {"r2", "within", "loss"}
    code, _, err = cli("report", "runs", "--out", "table.md", "--format", "markdown")
    assert code == 0, err
    assert "r2" in (module / "table.md").read_text()
    assert cli("export", "runs/one")[0] == 0


def test_a_wrong_schedule_is_one_sentence(cli, module):
    code, _, err = cli(*RUN, "--schedule", "cosin", "--out", "runs/one")
    assert (code, "did you mean 'cosine'" in err) == (2, True)
    assert not (module / "runs").exists()


def test_a_folder_of_simulate_is_reported_and_exported(cli, module):
    module_of = import_module(NAME)
    torch.manual_seed(0)
    task = fp.Task(module_of.net(), loss="mse", metrics=["r2"])
    run = fp.simulate(
        task, module_of.table(), algorithms.fedavg(lr=0.01), rounds=2, cohort=2, out="runs/mine"
    )
    code, _, err = cli("report", "runs", "--out", "table.md", "--format", "markdown")
    assert code == 0, err
    assert "r2" in (module / "table.md").read_text()
    code, _, err = cli("resume", "runs/mine")
    assert (code, "call simulate(..., out='runs/mine') again" in err) == (1, True)
    assert cli("export", "runs/mine", "--out", "a.safetensors")[0] == 0
    exported = load_file(module / "a.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in run.state.items())
    code, _, err = cli("export", "runs/mine", "--format", "onnx")
    assert (code, "pass --model package.module:function" in err) == (2, True), err
    code, _, err = cli("export", "runs/mine", "--format", "onnx", "--model", f"{NAME}:net")
    assert code == 0, err


def test_adapters_run_and_are_exported(cli, module):
    adapters = ["--scheme", "lowrank", "--rank", 2, "--onto", "frozen", "--adapter-alpha", 4, "--train", 2]
    code, _, err = cli(*RUN, *adapters, "--out", "runs/one")
    assert code == 0, err
    code, _, err = cli("export", "runs/one", "--out", "a.safetensors")
    assert (code, "--model" in err) == (2, True), err
    code, _, err = cli("export", "runs/one", "--out", "a.safetensors", "--model", f"{NAME}:moved")
    assert (code, "does not build the frozen weights" in err) == (2, True), err
    code, _, err = cli("export", "runs/one", "--out", "a.safetensors", "--model", f"{NAME}:net(width=16)")
    assert code == 0, err
    assert load_file(module / "a.safetensors").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
