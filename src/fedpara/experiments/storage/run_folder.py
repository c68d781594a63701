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

A round's metrics and what its clients keep are on the disk before its checkpoint, which has a digest of each. So a kill
or a power loss leaves a line or a file too many, never one too few. Opening the folder verifies all that its checkpoint
counts on and goes back to the one before it if something is damaged; only then does it remove what came later. A folder
whose two checkpoints both fail is refused and left as it is.
"""

import fcntl
import hashlib
import json
import math
import os
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedpara.engines.progress import Progress, Round
from fedpara.errors import ConfigError, RunError
from fedpara.experiments.config import Experiment, to_toml
from fedpara.experiments.storage.checkpoint import (
    CHECKPOINT,
    PREVIOUS,
    Checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from fedpara.experiments.storage.client_files import OnDisk, verify_kept
from fedpara.experiments.storage.environment import environment
from fedpara.experiments.storage.jsonl import append_line, first_rounds, keep_rounds, raw_lines, read_lines
from fedpara.experiments.storage.summary import read_config
from fedpara.files import PART, make_folder, sweep, sync, write_bytes

LOCK = ".lock"
NODES = "nodes.txt"
"""Where Flower's nodes hold what clients keep: under which name they do."""
LAID_FIRST = (LOCK, "environment.json", "model.json", "data.json")
"""What a kill may leave of a folder whose config was not written yet: it is still as good as empty."""


class RunFolder:
    """A run folder held by this process alone, at its newest good checkpoint."""

    def __init__(self, path: Path, experiment: Experiment, lock: int | None = None) -> None:
        self.path = path
        self.experiment = experiment
        self.notes: list[str] = []
        self._kept: dict[int, int] = {}
        self._digests: dict[int, str] = {}
        self._metrics = hashlib.sha256()
        unlocked = not (path / LOCK).exists()
        self._lock = _lock(path) if lock is None else lock
        try:
            self.progress = self._newest_checkpoint()
            at = self.progress.round if self.progress else 0
            self._previous = at
            sweep(path)
            self.memory = OnDisk(path / "clients", at)
            for name in ("metrics.jsonl", "timing.jsonl"):
                keep_rounds(path / name, at)
        except BaseException:
            if unlocked:
                (path / LOCK).unlink(missing_ok=True)
            self.close()
            raise

    def save(self, result: Round, timing: dict[str, float], engine: str) -> None:
        """One round: its lines and its clients' files, on the disk; then its checkpoint."""
        self._metrics.update(append_line(self.path / "metrics.jsonl", metrics_of(result)))
        line = {"round": result.number, **timing, "engine": engine}
        append_line(self.path / "timing.jsonl", line, durable=False)
        self._digests |= self.memory.secure(result.number, result.kept)
        self._kept |= dict.fromkeys(result.kept, result.number)
        identity, metrics = self.experiment.identity, self._metrics.hexdigest()
        write_checkpoint(self.path, Checkpoint(result.progress, self._kept, identity, self._digests, metrics))
        self.memory.settle(self._previous)
        self._previous = result.number

    @property
    def finished(self) -> bool:
        """All rounds are done, or the target accuracy was met."""
        done = self.progress.round if self.progress else 0
        target = self.experiment.target
        met = target is not None and any((m["accuracy"] or 0) >= target for m in self.metrics())
        return met or done >= self.experiment.rounds

    def refuse_kept_here(self) -> None:
        """RunError where what clients keep is in the folder: no node could go on with it."""
        if self._kept and not (self.path / NODES).exists():
            engine = read_config(self.path).engine
            raise RunError(
                f"what the clients of {self.path} keep lies in that folder: another engine ran it so far, and no node "
                f"has it. Go on with --engine {engine if engine != 'flower' else 'auto'}."
            )

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
        """The newest one that is whole, with all that it counts on. Nothing changes on the disk before it is found."""
        current, previous = self.path / CHECKPOINT, self.path / PREVIOUS
        paths = [path for path in (current, previous) if path.exists()]
        reasons: list[str] = []
        for path in paths:
            try:
                checkpoint = read_checkpoint(path)
            except RunError as error:
                reasons.append(str(error))
                continue
            checkpoint.refuse_other(path, self.experiment)
            try:
                self._verify(checkpoint)
            except RunError as error:
                reasons.append(f"{path} is of no use: {error}")
                continue
            if reasons:
                # The next checkpoint moves this name aside: it must not bury the good one under a damaged one.
                path.replace(current)
            self.notes += [
                f"{reason} The checkpoint before it, of round {checkpoint.round}, is used."
                for reason in reasons
            ]
            return checkpoint.progress
        if paths:
            raise RunError(
                f"no checkpoint in {self.path} can be used: {' '.join(reasons)} The folder was left as it is: bring "
                "back the files that are named here. Start the run anew in another folder if they are lost."
            )
        # A kill before the first checkpoint leaves one line at most, and what was laid down before it. More lines, or
        # only lines, are a run's small form, kept for reading.
        lines = len(raw_lines(self.path / "metrics.jsonl"))
        if lines > 1 or (
            lines and not any((self.path / name).exists() for name in ("model.json", "data.json"))
        ):
            raise RunError(
                f"{self.path} has {lines} round{'s' * (lines > 1)} and no {CHECKPOINT}: it is kept for reading and "
                "cannot go on. Start the run anew in another folder."
            )
        return None

    def _verify(self, checkpoint: Checkpoint) -> None:
        """RunError unless metrics and clients' files are those that the checkpoint counts on."""
        path = self.path / "metrics.jsonl"
        self._metrics = hashlib.sha256(first_rounds(path, checkpoint.round))
        if checkpoint.metrics not in (None, self._metrics.hexdigest()):
            raise RunError(
                f"the first {checkpoint.round} lines of {path} do not match its digest: they were changed after they "
                "were written."
            )
        self._kept = checkpoint.kept
        self._digests = verify_kept(self.path / "clients", checkpoint.kept, checkpoint.digests)


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
        sync(path.parent)
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
    folder = checked_run(path, experiment, data)
    try:
        if experiment != read_config(path):
            write_bytes(path / "config.toml", to_toml(experiment).encode())
    except BaseException:
        folder.close()
        raise
    return folder


def checked_run(path: Path, experiment: Experiment, data: str) -> RunFolder:
    """The folder, where this experiment can go on in it with these examples."""
    folder = RunFolder(path, experiment)
    try:
        _refuse_other_data(path, data)
        done = folder.progress.round if folder.progress else 0
        if experiment.rounds < done:
            raise ConfigError(
                f"rounds is {experiment.rounds}: expected at least the {done} that are done in {path}."
            )
        if experiment.engine == "flower" and not folder.finished:
            folder.refuse_kept_here()
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
        **({"everyone": asdict(result.everyone)} if result.everyone else {}),
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
