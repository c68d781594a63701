"""`fedpara run` with another loss, metrics, optimizer and schedule."""

import sys

import pytest
from own_task import NAME, write_module

from fedpara.experiments import read_run

RUN = [
    *["run", "--dataset", f"{NAME}:examples", "--split", "iid", "--clients", 4, "--cohort", 2, "--rounds", 2],
    *["--model", f"{NAME}:net(width=16)", "--scheme", "original", "--lr", 0.01, "--loss", "mse"],
]


@pytest.fixture
def module(tmp_path):
    write_module(tmp_path)
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
