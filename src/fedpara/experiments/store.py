"""A run is a folder.

    config.toml                    the experiment
    environment.json               versions, machine, threads
    model.json                     how the network is built again
    data.json                      a digest of the examples: a run goes on with the same ones
    metrics.jsonl                  one line a round: the same bits for the same config, seed and number of threads
    timing.jsonl                   one line a round: seconds, clients a second
    checkpoint.safetensors         round, model, server's variables, which clients keep something; .previous before it
    clients/                       what clients keep
    log.txt                        starts, resumes, refusals, the engine and why

A round's metrics are written before its checkpoint, so a kill between the two leaves a line too many, never
one too few: opening the folder cuts the metrics back to the checkpoint.
"""

import fcntl
import json
import math
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedpara.engines.loop import Progress, Round
from fedpara.errors import ConfigError, RunError
from fedpara.experiments.clients import OnDisk
from fedpara.experiments.config import Experiment, read_toml, to_toml
from fedpara.experiments.environment import environment
from fedpara.experiments.lines import append_line, keep_rounds, read_lines
from fedpara.experiments.tensor_files import read_tensors, write_tensors
from fedpara.files import PART, make_folder, sweep, write_bytes
from fedpara.state import State

CHECKPOINT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
LOCK = ".lock"
CLIENTS = "clients"
"""A checkpoint's table: of each client that keeps something, the round that its file is of."""
LAID_FIRST = (LOCK, "environment.json", "model.json", "data.json")
"""What a kill may leave of a folder whose config was not written yet: it is still as good as empty."""


class RunFolder:
    """A run folder held by this process alone, at its newest good checkpoint."""

    def __init__(self, path: Path, experiment: Experiment, lock: int | None = None) -> None:
        self.path = path
        self.experiment = experiment
        self.notes: list[str] = []
        self._kept: dict[int, int] = {}
        unlocked = not (path / LOCK).exists()
        self._lock = _lock(path) if lock is None else lock
        try:
            sweep(path)
            self.progress = self._newest_checkpoint()
            at = self.progress.round if self.progress else 0
            self._previous = at
            self.memory = OnDisk(path / "clients", at, self._kept)
            for name in ("metrics.jsonl", "timing.jsonl"):
                keep_rounds(path / name, at)
        except BaseException:
            if unlocked:
                (path / LOCK).unlink(missing_ok=True)
            self.close()
            raise

    def save(self, result: Round, timing: dict[str, float], engine: str) -> None:
        """One round: its lines, then its checkpoint."""
        append_line(self.path / "metrics.jsonl", metrics_of(result))
        line = {"round": result.number, **timing, "engine": engine}
        append_line(self.path / "timing.jsonl", line, durable=False)
        current = self.path / CHECKPOINT
        if current.exists():
            current.replace(self.path / PREVIOUS)
        self._kept |= dict.fromkeys(result.kept, result.number)
        state, metadata = _flatten(result.progress)
        if self._kept:
            state[CLIENTS] = torch.tensor(sorted(self._kept.items()))
        write_tensors(current, state, {**metadata, "identity": self.experiment.identity})
        self.memory.settle(self._previous)
        self._previous = result.number

    @property
    def finished(self) -> bool:
        """All rounds are done, or the target accuracy was met."""
        done = self.progress.round if self.progress else 0
        target = self.experiment.target
        met = target is not None and any((m["accuracy"] or 0) >= target for m in self.metrics())
        return met or done >= self.experiment.rounds

    def log(self, text: str) -> None:
        """One line of log.txt: what happened beside the rounds, and when."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{stamp} {text}\n")

    def close(self) -> None:
        os.close(self._lock)

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "metrics.jsonl")

    def timing(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "timing.jsonl")

    def _newest_checkpoint(self) -> Progress | None:
        """The newest one that is whole and whose rounds are all in the metrics."""
        current, previous = self.path / CHECKPOINT, self.path / PREVIOUS
        paths = [path for path in (current, previous) if path.exists()]
        reasons: list[str] = []
        for path in paths:
            try:
                state, metadata = read_tensors(path)
            except RunError as error:
                reasons.append(str(error))
                continue
            _refuse_other_config(path, metadata, self.experiment)
            progress = _unflatten(state, metadata)
            if [line["round"] for line in self.metrics()][: progress.round] != [
                *range(1, progress.round + 1)
            ]:
                reasons.append(
                    f"{self.path / 'metrics.jsonl'} lacks rounds up to {progress.round} of {path}."
                )
                continue
            if reasons:
                # The next checkpoint moves this name aside: it must not bury the good one under a damaged one.
                path.replace(current)
            self.notes += [
                f"{reason} The checkpoint before it, of round {progress.round}, is used."
                for reason in reasons
            ]
            if CLIENTS in state:
                self._kept = dict(state[CLIENTS].tolist())
            return progress
        if paths:
            raise RunError(
                f"no checkpoint in {self.path} can be used: {' '.join(reasons)} Start the run anew in another folder."
            )
        # A kill before the first checkpoint leaves one line at most, and what was laid down before it. More lines, or
        # only lines, are a run's small form, kept for reading.
        lines = len(self.metrics())
        if lines > 1 or (
            lines and not any((self.path / name).exists() for name in ("model.json", "data.json"))
        ):
            raise RunError(
                f"{self.path} has {lines} round{'s' * (lines > 1)} and no checkpoint: it is kept for reading and "
                "cannot go on. Start the run anew in another folder."
            )
        return None


def _refuse_other_config(checkpoint: Path, metadata: dict[str, str], experiment: Experiment) -> None:
    if metadata.get("identity") != experiment.identity:
        raise RunError(
            f"{checkpoint} belongs to another config than {checkpoint.parent / 'config.toml'}: the folder was mixed "
            "up. Restore the config it was made with, or start a new run folder."
        )


@dataclass(frozen=True)
class Summary:
    """What a run folder says, without opening it for writing."""

    path: Path
    experiment: Experiment
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]

    @property
    def rounds(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def accuracy(self) -> float | None:
        measured = [line["accuracy"] for line in self.metrics if line["accuracy"] is not None]
        return float(measured[-1]) if measured else None

    @property
    def bytes_up(self) -> int:
        return int(self.metrics[-1]["total_up"]) if self.metrics else 0

    @property
    def bytes_down(self) -> int:
        return int(self.metrics[-1]["total_down"]) if self.metrics else 0

    @property
    def seconds(self) -> float:
        return float(sum(line["seconds"] for line in self.timing))

    @property
    def engine(self) -> str | None:
        """Which engine ran the last round, how, and what could not be done and why."""
        return self.timing[-1].get("engine") if self.timing else None

    def reached(self, accuracy: float) -> dict[str, Any] | None:
        """The first round whose accuracy is at least this."""
        return next(
            (m for m in self.metrics if m["accuracy"] is not None and m["accuracy"] >= accuracy), None
        )


def create(path: Path, experiment: Experiment, model: dict[str, Any], data: str) -> RunFolder:
    """A new folder. One that holds a run already is refused with the command to go on.

    `model` says how the network is built again: its name, classes and the shape of an example. `data` is a digest.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file: a run needs a folder. Choose another --out.")
    make_folder(path, "run folder")
    refuse_used(path)
    lock = _lock(path)
    try:
        refuse_used(path)
        write_bytes(path / "environment.json", (json.dumps(environment(), indent=2) + "\n").encode())
        write_bytes(path / "model.json", (json.dumps(model) + "\n").encode())
        write_bytes(path / "data.json", (json.dumps({"blake2b": data}) + "\n").encode())
        write_bytes(path / "config.toml", to_toml(experiment).encode())
    except BaseException:
        os.close(lock)
        raise
    return RunFolder(path, experiment, lock)


def refuse_used(path: Path) -> None:
    """ConfigError for a folder that holds a run or anything else."""
    if not path.is_dir():
        return
    if (path / "config.toml").exists():
        raise ConfigError(
            f"{path} holds a run already, and nothing is overwritten. Go on with it: fedpara resume "
            f"{shlex.quote(str(path))}. Or choose another --out."
        )
    if any(entry.name not in LAID_FIRST and not entry.match(PART) for entry in path.iterdir()):
        raise ConfigError(f"{path} is not empty and holds no run: choose an empty or new folder for --out.")


def open_run(path: Path, experiment: Experiment, data: str) -> RunFolder:
    """The folder to go on with. `experiment` may differ from its config in FREE fields, and is written there."""
    folder = RunFolder(path, experiment)
    try:
        _refuse_other_data(path, data)
        done = folder.progress.round if folder.progress else 0
        if experiment.rounds < done:
            raise ConfigError(f"rounds is {experiment.rounds}: expected at least the {done} that are done.")
        if experiment != read_config(path):
            write_bytes(path / "config.toml", to_toml(experiment).encode())
    except BaseException:
        folder.close()
        raise
    return folder


def _refuse_other_data(path: Path, data: str) -> None:
    """RunError for other examples than the run began with: its name says which set, not what lies in the files."""
    try:
        begun = json.loads((path / "data.json").read_text())["blake2b"]
    except FileNotFoundError:
        return  # a folder of an earlier version
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"{path / 'data.json'} cannot be read ({error}): it says what the run was trained on."
        ) from None
    if begun != data:
        raise RunError(
            f"{path} was begun with other examples than those that are read now: expected the same files. Name their "
            "folder with --data-dir."
        )


def read_run(path: str | os.PathLike[str]) -> Summary:
    path = Path(path)
    experiment = read_config(path)
    return Summary(path, experiment, read_lines(path / "metrics.jsonl"), read_lines(path / "timing.jsonl"))


def read_config(path: Path) -> Experiment:
    if not (path / "config.toml").exists():
        raise ConfigError(
            f"{path} is not a run folder: it has no config.toml. `fedpara run --out {shlex.quote(str(path))}` makes "
            "one."
        )
    return read_toml(path / "config.toml")


class Final(NamedTuple):
    """A run's newest checkpoint: the model's shared state, its round, and of which round each client's file is."""

    state: State
    round: int
    kept: dict[int, int]


def final_state(path: Path) -> Final:
    """RunError where the newest is damaged or of another config: the one before it is of another round, and nobody
    would know.
    """
    experiment, reasons = read_config(path), []
    for name in (CHECKPOINT, PREVIOUS):  # while a checkpoint is written, only the one before it is there
        if not (path / name).exists():
            continue
        try:
            state, metadata = read_tensors(path / name)
        except RunError as error:
            reasons.append(str(error))
            continue
        _refuse_other_config(path / name, metadata, experiment)
        progress = _unflatten(state, metadata)
        if reasons:
            raise RunError(
                f"{reasons[0]} The one before it is of round {progress.round}: `fedpara resume "
                f"{shlex.quote(str(path))}` goes back to it."
            )
        kept = dict(state[CLIENTS].tolist()) if CLIENTS in state else {}
        return Final({**progress.x, **progress.buffers}, progress.round, kept)
    why = " ".join(reasons) or "the run has not finished its first round, or is kept for reading only."
    raise RunError(f"{path} has no readable checkpoint: {why}")


def read_progress(path: Path, round: int) -> Progress:
    """The checkpoint of that round, which whoever holds the folder goes on from."""
    for name in (CHECKPOINT, PREVIOUS):
        if (path / name).exists():
            progress = _unflatten(*read_tensors(path / name))
            if progress.round == round:
                return progress
    raise RunError(f"{path} has no checkpoint of round {round} here: expected one folder that all ranks see.")


def metrics_of(result: Round) -> dict[str, Any]:
    return {
        "round": result.number,
        "accuracy": _finite(result.accuracy),
        "loss": _finite(result.loss),
        "before": result.before,
        "after": result.after,
        "train_loss": _finite(result.train_loss),
        "up": result.bytes_up,
        "down": result.bytes_down,
        "total_up": result.progress.bytes_up,
        "total_down": result.progress.bytes_down,
        "clients": len(result.cohort) - len(result.refused),
        "refused": [{"client": client, "reason": reason} for client, reason in result.refused],
        "notes": list(result.notes),
    }


def is_locked(path: Path) -> bool:
    """Whether a process holds the folder now."""
    try:
        os.close(_lock(path))
    except RunError:
        return True
    return False


def _lock(path: Path) -> int:
    try:
        handle = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise RunError(f"{path} cannot be written to: {error.strerror}.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise RunError(f"{path} is in use by another process: wait for it to end, or stop it.") from None
    return handle


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _flatten(progress: Progress) -> tuple[State, dict[str, str]]:
    state = {f"x/{name}": tensor for name, tensor in progress.x.items()}
    state |= {f"buffers/{name}": tensor for name, tensor in progress.buffers.items()}
    for group, members in progress.server.items():
        state |= {f"server/{group}/{name}": tensor for name, tensor in members.items()}
    numbers = {"round": progress.round, "bytes_up": progress.bytes_up, "bytes_down": progress.bytes_down}
    groups = json.dumps(sorted(progress.server))
    return state, {**{name: str(value) for name, value in numbers.items()}, "groups": groups}


def _unflatten(state: State, metadata: dict[str, str]) -> Progress:
    def under(prefix: str) -> State:
        return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

    server = {group: under(f"server/{group}/") for group in json.loads(metadata["groups"])}
    numbers = {name: int(metadata[name]) for name in ("round", "bytes_up", "bytes_down")}
    return Progress(
        numbers["round"], under("x/"), under("buffers/"), server, numbers["bytes_up"], numbers["bytes_down"]
    )
