"""Trackers: the same numbers, also where a team already looks. Optional packages, imported on use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedpara.engines import Round
from fedpara.errors import ConfigError, MissingExtraError

Log = Callable[[Round, dict[str, float]], None]
TRACKERS = ("none", "tensorboard", "mlflow", "wandb")


def scalars(result: Round, timing: dict[str, float]) -> dict[str, float]:
    """What one round is, as named numbers."""
    values: dict[str, float | None] = {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "before": result.before,
        "after": result.after,
        "train_loss": result.train_loss,
        "bytes_up": float(result.progress.bytes_up),
        "bytes_down": float(result.progress.bytes_down),
        "seconds": timing["seconds"],
    }
    return {name: value for name, value in values.items() if value is not None and value == value}


@contextmanager
def tracker(kind: str, folder: Path, config: dict[str, Any]) -> Iterator[Log]:
    """A function that logs a round to the named tracker; files of file-based ones lie in the run folder."""
    if kind not in TRACKERS:
        raise ConfigError(f"unknown tracker {kind!r}: expected one of {', '.join(TRACKERS)}.")
    if kind == "none":
        yield lambda result, timing: None
        return
    try:
        log, close = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[kind](folder, config)
    except ImportError as error:
        raise MissingExtraError(
            f"--track {kind} needs the package {error.name}: pip install 'fedpara[track]'."
        ) from None
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
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlruns").absolute().as_uri())
    known = client.get_experiment_by_name("fedpara")
    run = client.create_run(known.experiment_id if known else client.create_experiment("fedpara"))
    for name, value in config.items():
        client.log_param(run.info.run_id, name, value)

    def log(result: Round, timing: dict[str, float]) -> None:
        for name, value in scalars(result, timing).items():
            client.log_metric(run.info.run_id, name, value, step=result.number)

    return log, lambda: client.set_terminated(run.info.run_id)


def _wandb(folder: Path, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    import wandb

    run = wandb.init(project="fedpara", name=folder.name, dir=str(folder), config=config)
    return lambda result, timing: run.log(scalars(result, timing), step=result.number), run.finish
