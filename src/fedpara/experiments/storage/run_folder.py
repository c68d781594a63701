"""RunFolder: a resumable run folder.

    config.toml                    the experiment
    environment.json               versions, machine, threads
    model.json                     what is needed to rebuild the network (see `model_file.py`)
    data.json                      a digest of the examples: a resumed run must use the same ones
    sources.json                   the config's references and digests of their source files, if it has any
    metrics.jsonl                  one line per round: the same bits for the same config, seed and number of threads
    timing.jsonl                   one line per round: seconds, clients per second
    clients.jsonl                  one line per client that was scored on its own test data, after the last round
    checkpoint.safetensors         round, model, server's variables, digests of the client memories; also .previous
    clients/                       client memories
    log.txt                        starts, resumes, rejected updates, the engine and why it was chosen
    output.txt                     what the processes of the run printed, if `--jobs` or `--minutes` started them

A round's metrics and client memories are on disk before its checkpoint, which holds a digest of each. A kill or a power
loss may therefore leave an extra line or file, but never loses one. Opening the folder verifies everything that its
checkpoint refers to, and falls back to the previous checkpoint if something is damaged. Only then does it remove
anything newer. If both checkpoints fail, opening raises an error and leaves the folder unchanged.
"""

import fcntl
import hashlib
import json
import os
import shlex
import time
from collections.abc import Container
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedpara.engines.progress import Progress, Round
from fedpara.errors import ConfigError, RunError
from fedpara.experiments.config import FREE, Experiment
from fedpara.experiments.config_file import to_toml
from fedpara.experiments.storage.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    checkpoint_files,
    read_checkpoint,
    write_checkpoint,
)
from fedpara.experiments.storage.client_files import OnDisk, verify_memories
from fedpara.experiments.storage.client_scores import CLIENT_SCORES, lines_of
from fedpara.experiments.storage.environment import environment
from fedpara.experiments.storage.jsonl import (
    append_line,
    append_lines,
    drop_rounds_after,
    first_rounds,
    raw_lines,
    read_lines,
)
from fedpara.experiments.storage.metrics_line import metrics_of
from fedpara.experiments.storage.sources import SOURCES, describe_sources
from fedpara.experiments.storage.summary import evaluations, read_config, read_metric, stops_early
from fedpara.files import PART, make_folder, sweep, sync, write_bytes

LOCK = ".lock"
OUTPUT = "output.txt"
NODES = "nodes.txt"
"""Present if Flower's nodes hold the client memories. It contains the name of the run on the nodes."""
WRITTEN_FIRST = (LOCK, "environment.json", "model.json", "data.json", SOURCES)
"""Files that a kill may leave before config.toml is written. A folder with nothing else counts as empty."""


class RunFolder:
    """A run folder, locked by this process, at its newest intact checkpoint."""

    def __init__(self, path: Path, experiment: Experiment, lock: int | None = None) -> None:
        self.path = path
        self.experiment = experiment
        self.notes: list[str] = []
        self._memories: dict[int, int] = {}
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
            for name in ("metrics.jsonl", "timing.jsonl", CLIENT_SCORES):
                drop_rounds_after(path / name, at)
        except BaseException:
            if unlocked:
                (path / LOCK).unlink(missing_ok=True)
            self.close()
            raise

    def save(self, result: Round, timing: dict[str, float], engine: str) -> None:
        """Save one round: first its lines and client memories, then its checkpoint."""
        self._metrics.update(append_line(self.path / "metrics.jsonl", metrics_of(result)))
        if result.everyone is not None:
            append_lines(self.path / CLIENT_SCORES, lines_of(result.number, result.everyone))
        line = {"round": result.number, **timing, "engine": engine}
        append_line(self.path / "timing.jsonl", line, durable=False)
        self._digests |= self.memory.secure(result.number, result.memories)
        self._memories |= dict.fromkeys(result.memories, result.number)
        identity, metrics = self.experiment.identity, self._metrics.hexdigest()
        write_checkpoint(
            self.path, Checkpoint(result.progress, self._memories, identity, self._digests, metrics)
        )
        self.memory.settle(self._previous)
        self._previous = result.number

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, the target was reached, or the patience is used up."""
        done = self.progress.round if self.progress else 0
        return done >= self.experiment.rounds or stops_early(
            self.experiment, self.metrics(), read_metric(self.path)
        )

    @property
    def evaluations(self) -> list[float]:
        """The scores so far that count for patience."""
        return evaluations(self.experiment, self.metrics())

    @property
    def holds_memories(self) -> bool:
        """Whether client memories, or what the clients know, are in this folder, and not on Flower's nodes."""
        known, folds = (self.progress.known, self.progress.folds) if self.progress else (None, None)
        has = self._memories or (known and known.last) or (folds and any(folds.last.values()))
        return bool(has) and not (self.path / NODES).exists()

    def log(self, text: str) -> None:
        """Append a line with the time to log.txt."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{stamp} {text}\n")

    def close(self) -> None:
        os.close(self._lock)

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "metrics.jsonl")

    def _newest_checkpoint(self) -> Progress | None:
        """The newest checkpoint that is intact with all its files. Until it is found, nothing on disk changes."""
        paths = checkpoint_files(self.path)
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
                reasons.append(f"{path} cannot be used: {error}")
                continue
            if reasons:
                # The next checkpoint renames the current one: a damaged one must not replace the intact one.
                path.replace(self.path / CHECKPOINT)
            self.notes += [
                f"{reason} Falling back to the previous checkpoint, of round {checkpoint.round}."
                for reason in reasons
            ]
            return checkpoint.progress
        if paths:
            raise RunError(
                f"no checkpoint in {self.path} can be used: {' '.join(reasons)} The folder is unchanged: restore these "
                "files, or start the run again in a new folder."
            )
        # A kill before the first checkpoint leaves at most one line, beside the files written before it. An archived
        # run has more lines, or a line without data.json.
        lines = len(raw_lines(self.path / "metrics.jsonl"))
        if lines > 1 or (lines and not (self.path / "data.json").exists()):
            raise RunError(
                f"{self.path} has {lines} round{'s' * (lines > 1)} and no {CHECKPOINT}: it is an archived run, which "
                "cannot be resumed. Start the run again in a new folder."
            )
        return None

    def _verify(self, checkpoint: Checkpoint) -> None:
        """RunError if the metrics or the client memories differ from those that the checkpoint refers to."""
        path = self.path / "metrics.jsonl"
        self._metrics = hashlib.sha256(first_rounds(path, checkpoint.round))
        if checkpoint.metrics not in (None, self._metrics.hexdigest()):
            raise RunError(
                f"the first {checkpoint.round} lines of {path} do not match their digest in the checkpoint: they were "
                "changed."
            )
        self._memories = checkpoint.memories
        self._digests = verify_memories(self.path / "clients", checkpoint.memories, checkpoint.digests)


def create(path: Path, experiment: Experiment, model: dict[str, Any], data: dict[str, Any]) -> RunFolder:
    """A new run folder. ConfigError if the folder already holds a run or other files.

    `model` and `data` are the contents of model.json and data.json.
    """
    sources = describe_sources(experiment)
    make_folder(path, "run folder")
    refuse_used(path)
    with ExitStack() as on_error:
        lock = _lock(path)
        on_error.callback(os.close, lock)
        refuse_used(path)  # another process may have created a run meanwhile
        write_bytes(path / "environment.json", (json.dumps(environment(), indent=2) + "\n").encode())
        if sources:
            write_bytes(path / SOURCES, (json.dumps(sources, indent=2) + "\n").encode())
        write_bytes(path / "model.json", (json.dumps(model) + "\n").encode())
        write_bytes(path / "data.json", (json.dumps(data) + "\n").encode())
        write_bytes(path / "config.toml", to_toml(experiment).encode())
        sync(path.parent)
        on_error.pop_all()
    return RunFolder(path, experiment, lock)


def refuse_used(path: Path) -> None:
    """ConfigError if the folder holds a run or other files."""
    entries = list(path.iterdir()) if path.is_dir() else []
    if path / "config.toml" in entries:
        raise ConfigError(
            f"{path} already holds a run, which would be overwritten. Resume it: fedpara resume "
            f"{shlex.quote(str(path))}. Or choose another --out."
        )
    if any(entry.name not in WRITTEN_FIRST and not entry.match(PART) for entry in entries):
        raise ConfigError(f"{path} is not empty and holds no run: choose an empty or new folder for --out.")


def refuse_another(path: Path, asked: Experiment, free: Container[str] = FREE) -> None:
    """ConfigError if the folder holds a run of another experiment. Fields in `free` may differ."""
    there = read_config(path)
    names = [f.name for f in fields(Experiment) if getattr(there, f.name) != getattr(asked, f.name)]
    if there.identity == asked.identity:
        names = [name for name in names if name in FREE]  # the others have no effect on the result
    told = [
        f"{name} is {getattr(there, name)!r} there and {getattr(asked, name)!r} here"
        for name in names
        if name not in free
    ]
    if told:
        raise ConfigError(
            f"{path} holds a run of another experiment ({', '.join(told)}): choose another folder, or resume that run "
            f"by giving only its folder or config ({path / 'config.toml'})."
        )


def open_run(path: Path, experiment: Experiment, data: str) -> RunFolder:
    """The folder, ready to resume. Changes of FREE fields in `experiment` are written to its config."""
    folder = load_run(path, experiment, data)
    with ExitStack() as on_error:
        on_error.callback(folder.close)
        if experiment != read_config(path):
            write_bytes(path / "config.toml", to_toml(experiment).encode())
        on_error.pop_all()
    return folder


def load_run(path: Path, experiment: Experiment, data: str) -> RunFolder:
    """The folder, if this experiment can resume in it with these examples."""
    folder = RunFolder(path, experiment)
    with ExitStack() as on_error:
        on_error.callback(folder.close)
        if data_digest(path) not in (None, data):
            raise RunError(
                f"{path} was started with different examples, or another split among clients: use the same data. On "
                "the command line, --data-dir names its folder."
            )
        done = folder.progress.round if folder.progress else 0
        if experiment.rounds < done:
            raise ConfigError(
                f"rounds is {experiment.rounds}: expected at least the {done} that are done in {path}."
            )
        if experiment.engine == "flower" and not folder.finished and folder.holds_memories:
            engine = read_config(path).engine
            raise RunError(
                f"the client memories of {path} are in that folder, so no Flower node has them: resume with --engine "
                f"{engine if engine != 'flower' else 'auto'}."
            )
        on_error.pop_all()
    return folder


def refuse_other_base(path: Path, base: str) -> None:
    """RunError if the run began on other frozen tensors. Folders of earlier versions do not record them."""
    file = path / "model.json"
    try:
        recorded = json.loads(file.read_text()).get("base") if file.exists() else None
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{file} cannot be read ({error}): expected the description of the network.") from None
    if recorded not in (None, base):
        raise RunError(
            f"{path} was started on another base: the frozen weights of the model differ. Load the same weights."
        )


def data_digest(path: Path) -> str | None:
    """The digest of the examples that the run started with. None in folders of earlier versions."""
    file = path / "data.json"
    try:
        return str(json.loads(file.read_text())["blake2b"]) if file.exists() else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"{file} cannot be read ({error}): expected the digest of the run's examples."
        ) from None


def is_locked(path: Path) -> bool:
    """Whether a process has the folder open."""
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
        raise RunError(f"{path} is in use by another process: stop it, or wait for it to end.") from None
    return handle
