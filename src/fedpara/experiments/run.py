"""Run an experiment into a folder, or resume one.

Messages for the user go to the logger "fedpara" and to the run folder's log.txt. Some lines go only to log.txt.
"""

import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedpara.engines.checks import tell_unused_test_set
from fedpara.engines.distributed.process_group import Part, ProcessGroup, join
from fedpara.engines.participation.devices import read_devices
from fedpara.engines.progress import Round, Schedule
from fedpara.engines.secure.checks import unchecked
from fedpara.engines.server.engine import Engine
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.engines.simulate import build_engine, prepare, refuse_flower_engine, says_stop
from fedpara.errors import ConfigError, RunError, in_a_line
from fedpara.experiments.build import Parts, build, build_attack, build_privacy, build_robust, build_sampler
from fedpara.experiments.config import Experiment
from fedpara.experiments.follower import Follower, open_on_ranks
from fedpara.experiments.storage.environment import environment_warning
from fedpara.experiments.storage.model_file import describe_model
from fedpara.experiments.storage.run_folder import (
    NODES,
    RunFolder,
    create,
    load_run,
    open_run,
    refuse_other_base,
    refuse_used,
)
from fedpara.experiments.storage.sources import source_warning
from fedpara.experiments.storage.summary import Summary, read_config, read_run

logger = logging.getLogger("fedpara")
logger.setLevel(logging.INFO)  # without handlers, Python still shows only warnings

OnRound = Callable[[Round, dict[str, float]], object]
"""Called after each round with its result, and with its `seconds` and `clients_per_second`.

If it returns False, the run stops after this round, which is saved: `resume` continues it.
"""


class Prepared(NamedTuple):
    """The result of `prepare`, and the settings that it was called with."""

    session: Session
    schedule: Schedule
    personal: bool
    settings: Settings


Host = Callable[[Session, Parts, RunFolder, Schedule], tuple[Engine, Schedule]]
"""Makes an engine whose clients run outside this process (Flower), and the schedule that it can follow."""


def run(
    experiment: Experiment,
    path: str | PathLike[str],
    *,
    data_dir: str | PathLike[str] | None = None,
    on_round: OnRound | None = None,
) -> Summary:
    """Run the experiment into a new folder. Everything is checked before the folder is created.

    Under torchrun every rank calls this; rank 0 writes the folder and calls `on_round`.
    """
    refuse_flower_engine(experiment.engine)
    path, group = Path(path), join()
    with group.in_step(f"the end of {path}"):
        parts = build(experiment, data_dir)
        prepared = _prepared(experiment, parts)
        described = describe_run(experiment, parts, prepared[0])
        folder = open_on_ranks(group, path, experiment, lambda: create(path, experiment, *described))
        run_folder(group, parts, prepared, folder, on_round)
    return read_run(path)


def lay_out(experiment: Experiment, path: Path, *, data_dir: Path | None = None) -> None:
    """Make the folder of a run without starting it; `resume` starts it. Under torchrun rank 0 makes it."""
    lay_out_all({path: experiment}, data_dir=data_dir)


def lay_out_all(runs: Mapping[Path, Experiment], *, data_dir: Path | None = None) -> None:
    """`lay_out` for several runs: all are checked before the first folder is made."""
    group = join()

    def work() -> Part:
        if group.rank == 0:
            described = {}
            for path, experiment in runs.items():
                refuse_used(path)
                parts = build(experiment, data_dir)
                session, *_ = _prepared(experiment, parts)
                described[path] = describe_run(experiment, parts, session)
            for path, experiment in runs.items():
                create(path, experiment, *described[path]).close()
        return Part()

    group.gather(f"laying out {', '.join(map(str, runs))}", work)


def resume(
    path: str | PathLike[str],
    *,
    rounds: int | None = None,
    engine: str | None = None,
    precision: str | None = None,
    device: str | None = None,
    data_dir: str | PathLike[str] | None = None,
    on_round: OnRound | None = None,
    host: Host | None = None,
) -> Summary:
    """Resume the run from its last checkpoint.

    With the same engine and number of threads the results are bit for bit those of an uninterrupted run.
    """
    path = Path(path)
    experiment = _changed(path, rounds, engine, precision, device)
    if host is None:
        refuse_flower_engine(experiment.engine)
        _refuse_on_nodes(path)
    group = join()
    with group.in_step(f"the end of {path}"):
        parts = build(experiment, data_dir)
        prepared = _prepared(experiment, parts)
        refuse_other_base(path, prepared[0].program.base)
        folder = open_on_ranks(group, path, experiment, lambda: open_run(path, experiment, parts.digest))
        run_folder(group, parts, prepared, folder, on_round, host)
    return read_run(path)


def rounds_done(
    path: Path,
    rounds: int | None,
    engine: str | None,
    precision: str | None,
    data_dir: Path | None,
    device: str | None = None,
) -> tuple[int, bool]:
    """(the number of finished rounds, whether these are all), from the checkpoint.

    Raises what `resume` on a host would raise, before the host is started. The folder is not changed.
    """
    experiment = _changed(path, rounds, engine, precision, device)
    parts = build(experiment, data_dir)
    _prepared(experiment, parts)
    folder = load_run(path, experiment, parts.digest)
    folder.close()
    return folder.progress.round if folder.progress else 0, folder.finished


def _changed(
    path: Path, rounds: int | None, engine: str | None, precision: str | None, device: str | None
) -> Experiment:
    there = read_config(path)
    if there.objects is not None:
        raise RunError(
            f"{path} was started from Python objects: call simulate(..., out={str(path)!r}) again to resume it."
        )
    if rounds not in (None, there.rounds) and there.rounds_decide:
        raise ConfigError(
            f"rounds is {rounds}, but the schedule {there.schedule!r} of {path} follows its {there.rounds} rounds: "
            "start a new run, or give the schedule its own `rounds`."
        )
    given = {"rounds": rounds, "engine": engine, "precision": precision, "device": device}
    return replace(there, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _settings(experiment: Experiment, parts: Parts) -> Settings:
    """The settings of the run. Their fields have the same names in an Experiment."""
    named = {field.name for field in fields(Experiment)}
    same = {field.name: getattr(experiment, field.name) for field in fields(Settings) if field.name in named}
    same |= {"sampler": build_sampler(experiment), "privacy": build_privacy(experiment)}
    same |= {"robust": build_robust(experiment), "attack": build_attack(experiment)}
    devices = read_devices(experiment.bandwidth, experiment.speed, experiment.device_deadline)
    return Settings(**same, link=parts.link, devices=devices)


def _prepared(experiment: Experiment, parts: Parts) -> Prepared:
    settings = _settings(experiment, parts)
    return Prepared(*prepare(parts.task, parts.data, parts.algorithm, settings), settings)


def describe_run(
    experiment: Experiment, parts: Parts, session: Session
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the folder's model.json and data.json hold."""
    data: dict[str, Any] = {"blake2b": parts.digest}
    if experiment.objects or "dataset" in experiment.references:  # a FederatedData brings its own clients
        data["clients"] = len(parts.data)
    return describe_model(experiment, parts, session.program), data


def run_folder(
    group: ProcessGroup,
    parts: Parts,
    prepared: Prepared,
    folder: RunFolder | Follower,
    on_round: OnRound | None,
    host: Host | None = None,
) -> None:
    with _logged_to(folder):
        try:
            for note in folder.notes:
                logger.info("%s", note)
            if folder.progress and not folder.finished:
                logger.info("resumed after round %d", folder.progress.round)
            if host is None and not folder.finished and (note := environment_warning(folder.path)):
                logger.info("%s", note)
            if not folder.finished and (note := source_warning(folder.path, folder.experiment)):
                logger.warning("%s", note)
            if not folder.finished:
                with _memory_errors_named(folder.path):
                    _run_rounds(parts, prepared, folder, on_round, host)
        except BaseException as error:
            folder.log(f"stopped: {type(error).__name__}: {error}")
            if group.over and isinstance(error, RunError):
                raise RunError(
                    f"{error} Finished rounds are saved: resume with `fedpara resume {shlex.quote(str(folder.path))}`, "
                    "on any number of ranks."
                ) from None
            raise
        finally:
            folder.close()


class _FolderHandler(logging.Handler):
    """Writes this thread's messages to its run folder, because other threads may run other folders."""

    def __init__(self, folder: RunFolder | Follower) -> None:
        super().__init__()
        self._folder, self._thread = folder, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._folder.log(record.getMessage())


@contextmanager
def _logged_to(folder: RunFolder | Follower) -> Iterator[None]:
    handler = _FolderHandler(folder)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _memory_errors_named(path: Path) -> Iterator[None]:
    """RunError if the host runs out of memory: numpy raises a MemoryError, torch a RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise RunError(
            f"{path} ran out of memory ({in_a_line(error)}). Finished rounds are saved. Start a new run with a smaller "
            "batch or cohort."
        ) from error


def _run_rounds(
    parts: Parts,
    prepared: Prepared,
    folder: RunFolder | Follower,
    on_round: OnRound | None,
    host: Host | None = None,
) -> None:
    experiment = folder.experiment
    session, schedule, personal, settings = prepared
    if host is not None:
        assert isinstance(folder, RunFolder), "Flower under torchrun"
        engine, schedule = host(session, parts, folder, schedule)
    else:
        engine = build_engine(settings, session, parts.task, parts.data, folder.memory)
    chosen = f"engine {engine.name} ({experiment.engine} was requested): {engine.why}"
    (logger.info if _is_unexpected(experiment.engine, engine.name) else folder.log)(chosen)
    tell_unused_test_set(session.program, parts.task, personal)
    if note := unchecked(settings):
        logger.info("%s", note)
    started = time.perf_counter()
    for result in run_rounds(session, engine, schedule, personal, folder.progress, folder.evaluations):
        seconds = time.perf_counter() - started
        timing = {"seconds": seconds, "clients_per_second": len(result.cohort) / seconds}
        folder.save(result, timing, f"{engine.name}: {engine.why}")
        for client, reason in result.refused:
            logger.info("round %d: client %d refused: %s", result.number, client, reason)
        for note in result.notes:
            logger.info("%s", note)
        if on_round is not None and says_stop(None if join().rank else on_round(result, timing)):
            logger.info("stopped after round %d: on_round returned False", result.number)
            break
        started = time.perf_counter()
    folder.log(f"engine {engine.name}: {engine.why}")


def _is_unexpected(asked: str, ran: str) -> bool:
    """Whether this is not the requested engine, or one that leaves a GPU idle."""
    return asked != ran if asked != "auto" else ran == "sequential" and torch.cuda.is_available()


def _refuse_on_nodes(path: Path) -> None:
    """RunError if the clients' memories are on Flower's nodes, where no engine of this process can read them."""
    if (path / NODES).exists():
        raise RunError(
            f"the client memories of {path} are on Flower's nodes ({NODES} names the run there): resume with --engine "
            "flower, or with the same `flwr run`."
        )
