"""Trackers: what their own readers return matches metrics.jsonl."""

from dataclasses import asdict, replace
from importlib.util import find_spec

import pytest

from fedpara.errors import ConfigError, MissingExtraError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.trackers import require, scalars, tracker

TINY = Experiment(
    model="mlp", scheme="original", clients=8, cohort=2, rounds=4, epochs=None, steps=1, evaluate_every=2
)
NAMES = {"accuracy", "loss", "train_loss", "bytes_up", "bytes_down", "seconds"}


def tracked(kind, path):
    """Two tracked rounds, and two more after a resume."""
    first = replace(TINY, rounds=2)
    with tracker(kind, path, asdict(first)) as log:
        run(first, path / "run", on_round=log)
    with tracker(kind, path, asdict(TINY)) as log:
        resume(path / "run", rounds=4, on_round=log)
    return read_run(path / "run").metrics


def expected(metrics):
    """(step, value) by name, as in metrics.jsonl."""
    fields = {"accuracy": "accuracy", "loss": "loss", "train_loss": "train_loss"}
    fields |= {"bytes_up": "total_up", "bytes_down": "total_down"}
    return {
        name: [(line["round"], line[field]) for line in metrics if line[field] is not None]
        for name, field in fields.items()
    }


def test_tensorboard_reads_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install '.[track]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = tracked("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    for name, points in expected(metrics).items():
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points]
        assert [v for _, v in found] == pytest.approx([v for _, v in points], rel=1e-6)
    assert [event.step for event in events.Scalars("accuracy")] == [2, 4]


def test_mlflow_reads_what_was_logged(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install '.[track]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    metrics = tracked("mlflow", tmp_path)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("fedpara")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.data.params["model"] == "mlp"
    assert logged.data.params["lr"] == "0.1"
    assert set(logged.data.metrics) == NAMES
    for name, points in expected(metrics).items():
        history = client.get_metric_history(logged.info.run_id, name)
        assert sorted((point.step, point.value) for point in history) == points


def test_a_missing_package_is_reported_with_the_install_command(tmp_path):
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed here: its absence cannot be shown")
    with pytest.raises(MissingExtraError, match=r"needs the package wandb: pip install"):
        require("wandb")
    with pytest.raises(MissingExtraError, match="wandb"), tracker("wandb", tmp_path, {}):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_is_rejected():
    with pytest.raises(ConfigError, match="none, tensorboard, mlflow, wandb"):
        require("visdom")


def test_tracker_none_writes_nothing(tmp_path):
    require("none")
    with tracker("none", tmp_path, {}) as log:
        run(TINY, tmp_path / "run", on_round=log)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_missing_scores_are_not_logged(tmp_path):
    seen = []
    run(TINY, tmp_path / "run", on_round=lambda result, timing: seen.append(scalars(result, timing)))
    assert "accuracy" not in seen[0]
    assert "accuracy" in seen[1]
    assert all(value == value for logged in seen for value in logged.values())
