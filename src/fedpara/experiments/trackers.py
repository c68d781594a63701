"""Trackers: log the metrics to TensorBoard, MLflow or Weights & Biases. Each package is imported on use."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedpara.engines import Round
from fedpara.errors import ConfigError, MissingExtraError, install
from fedpara.files import write_bytes

Log = Callable[[Round, dict[str, float]], None]
TRACKERS = ("none", "tensorboard", "mlflow", "wandb")


def scalars(result: Round, timing: dict[str, float]) -> dict[str, float]:
    """The measured numbers of a round, by name."""
    values: dict[str, float | None] = {
        **result.scores,
        "before": result.before,
        "after": result.after,
        "train_loss": result.train_loss,
        "bytes_up": float(result.progress.bytes_up),
        "bytes_down": float(result.progress.bytes_down),
        "seconds": timing["seconds"],
    }
    return {name: value for name, value in values.items() if value is not None and value == value}


def require(kind: str) -> None:
    """ConfigError for an unknown tracker, MissingExtraError if its package is not installed."""
    if kind not in TRACKERS:
        raise ConfigError(f"unknown tracker {kind!r}: expected one of {', '.join(TRACKERS)}.")
    if kind != "none" and find_spec(kind) is None:
        how = install("track") if kind != "wandb" else "pip install wandb."
        raise MissingExtraError(f"--track {kind} needs the package {kind}: {how}")


@contextmanager
def tracker(kind: str, folder: Path, config: dict[str, Any]) -> Iterator[Log]:
    """A function that logs a round to the named tracker. File-based trackers write to the run folder."""
    require(kind)
    if kind == "none":
        yield lambda result, timing: None
        return
    log, close = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[kind](folder, config)
    try:
        yield log
    finally:
        close()


def _tensorboard(folder: Path, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard")

    def log(result: Round, timing: dict[str, float]) -> None:
        for name, value in scalars(result, timing).items():
            writer.add_scalar(name, value, result.number)

    return log, writer.close


def _mlflow(folder: Path, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    """Log to MLFLOW_TRACKING_URI, or to files in the run folder. A resumed run continues its MLflow run."""
    # MLflow 3 needs this setting for its file store.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").absolute().as_uri()
    client = MlflowClient(tracking_uri=uri)
    id_file = folder / "mlflow-run.txt"
    if id_file.exists():
        run_id = id_file.read_text().strip()
    else:
        known = client.get_experiment_by_name("fedpara")
        experiment = known.experiment_id if known else client.create_experiment("fedpara")
        run_id = client.create_run(experiment, run_name=folder.name).info.run_id
        for name, value in config.items():
            client.log_param(run_id, name, value)
        write_bytes(id_file, f"{run_id}\n".encode())

    def log(result: Round, timing: dict[str, float]) -> None:
        for name, value in scalars(result, timing).items():
            client.log_metric(run_id, name, value, step=result.number)

    return log, lambda: client.set_terminated(run_id)


def _wandb(folder: Path, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    import wandb

    run = wandb.init(project="fedpara", name=folder.name, dir=str(folder), config=config)
    return lambda result, timing: run.log(scalars(result, timing), step=result.number), run.finish
