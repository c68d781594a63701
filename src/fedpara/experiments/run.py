"""Run an experiment into a folder, or go on with one."""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch

from fedpara.engines.distributed.process_group import Part, ProcessGroup, join
from fedpara.engines.progress import Round, Schedule
from fedpara.engines.server import Engine, run_rounds
from fedpara.engines.session import Session
from fedpara.engines.simulate import build_engine, prepare, refuse_hostless
from fedpara.errors import ConfigError, RunError, expect_kind, in_a_line
from fedpara.experiments.build import Parts, build
from fedpara.experiments.config import Experiment
from fedpara.experiments.follower import Follower, opened
from fedpara.experiments.storage.environment import unlike
from fedpara.experiments.storage.run_folder import (
    NODES,
    RunFolder,
    checked_run,
    create,
    open_run,
    refuse_used,
)
from fedpara.experiments.storage.summary import Summary, read_config, read_run

Watcher = Callable[[Round, dict[str, float]], None]
Speaker = Callable[[str], None]
Prepared = tuple[Session, Schedule, bool]
Host = Callable[[Session, Parts, RunFolder, Schedule, Speaker], tuple[Engine, Schedule]]
"""An engine that lives outside this process (Flower), and the schedule as it can keep it."""


def run(
    experiment: Experiment,
    path: str | PathLike[str],
    *,
    data_dir: str | PathLike[str] | None = None,
    watch: Watcher | None = None,
    say: Speaker | None = None,
) -> Summary:
    """A new run folder, filled. Everything is checked before the folder is made: a mistake leaves nothing behind.

    Under torchrun every rank calls this; rank 0 holds the folder, and `watch` and `say` are called there alone.
    """
    expect_kind("experiment", experiment, Experiment, ConfigError)
    refuse_hostless(experiment.engine)
    path, group = Path(path), join()
    with group.in_step(f"the end of {path}"):
        parts = build(experiment, data_dir)
        prepared = _prepared(experiment, parts)
        model = _model_of(experiment, parts)
        folder = opened(group, path, experiment, lambda: create(path, experiment, model, parts.digest))
        _go(group, parts, prepared, folder, watch, say)
    return read_run(path)


def lay_out(experiment: Experiment, path: Path, *, data_dir: Path | None = None) -> None:
    """The folder of a run that has not begun; `resume` begins it. Under torchrun rank 0 makes it, and all wait."""
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
                _prepared(experiment, parts)
                described[path] = _model_of(experiment, parts), parts.digest
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
    data_dir: str | PathLike[str] | None = None,
    watch: Watcher | None = None,
    say: Speaker | None = None,
    host: Host | None = None,
) -> Summary:
    """Go on where the folder's last checkpoint is; in the same engine and with the same number of threads, to the same
    bits as if it had never stopped.
    """
    path = Path(path)
    experiment = _as_told(path, rounds, engine, precision)
    if host is None:
        refuse_hostless(experiment.engine)
        _refuse_on_nodes(path)
    group = join()
    with group.in_step(f"the end of {path}"):
        parts = build(experiment, data_dir)
        prepared = _prepared(experiment, parts)
        folder = opened(group, path, experiment, lambda: open_run(path, experiment, parts.digest))
        _go(group, parts, prepared, folder, watch, say, host)
    return read_run(path)


def look_over(
    path: Path, rounds: int | None, engine: str | None, precision: str | None, data_dir: Path | None
) -> tuple[int, bool]:
    """How many rounds are done, by the checkpoint, and whether that is all.

    What `resume` on a host would refuse is refused here, before there is one; the config stays as it was.
    """
    experiment = _as_told(path, rounds, engine, precision)
    parts = build(experiment, data_dir)
    _prepared(experiment, parts)
    folder = checked_run(path, experiment, parts.digest)
    folder.close()
    return folder.progress.round if folder.progress else 0, folder.finished


def _as_told(path: Path, rounds: int | None, engine: str | None, precision: str | None) -> Experiment:
    told = {"rounds": rounds, "engine": engine, "precision": precision}
    return replace(read_config(path), **{name: value for name, value in told.items() if value is not None})  # type: ignore[arg-type]


def _prepared(experiment: Experiment, parts: Parts) -> Prepared:
    return prepare(
        parts.task,
        parts.data,
        parts.algorithm,
        rounds=experiment.rounds,
        cohort=experiment.cohort,
        seed=experiment.seed,
        link=parts.link,
        share=experiment.share,  # type: ignore[arg-type]
        engine=experiment.engine,
        precision=experiment.precision,
        evaluate_every=experiment.evaluate_every,
        personal=experiment.personal,
        max_norm=experiment.max_norm,
        weights=experiment.weights,  # type: ignore[arg-type]
        max_share=experiment.max_share,
        target=experiment.target,
    )


def _go(
    group: ProcessGroup,
    parts: Parts,
    prepared: Prepared,
    folder: RunFolder | Follower,
    watch: Watcher | None,
    say: Speaker | None,
    host: Host | None = None,
) -> None:
    if group.rank:
        watch = say = None

    def tell(text: str) -> None:
        folder.log(text)
        if say is not None:
            say(text)

    try:
        for note in folder.notes:
            tell(note)
        if folder.progress:
            tell(f"resumed after round {folder.progress.round}")
        if host is None and not folder.finished and (note := unlike(folder.path)):
            tell(note)
        if not folder.finished:
            with _memory_that_runs_out(folder.path):
                _play(parts, prepared, folder, watch, tell, host)
    except BaseException as error:
        folder.log(f"stopped: {type(error).__name__}: {error}")
        if group.over and isinstance(error, RunError):
            raise RunError(
                f"{error} What was finished is saved: `fedpara resume {shlex.quote(str(folder.path))}` goes on, on any "
                "number of ranks."
            ) from None
        raise
    finally:
        folder.close()


@contextmanager
def _memory_that_runs_out(path: Path) -> Iterator[None]:
    """RunError for the host's, as for a GPU's: numpy has an error of its own for it, torch a RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise RunError(
            f"the memory ran out in {path} ({in_a_line(error)}): fewer steps, a smaller batch or a smaller cohort need "
            "less, in a run of another folder. Rounds that were finished are saved."
        ) from error


def _play(
    parts: Parts,
    prepared: Prepared,
    folder: RunFolder | Follower,
    watch: Watcher | None,
    tell: Speaker,
    host: Host | None = None,
) -> None:
    experiment = folder.experiment
    session, schedule, personal = prepared
    if host is not None:
        assert isinstance(folder, RunFolder), "Flower under torchrun"
        engine, schedule = host(session, parts, folder, schedule, tell)
    else:
        engine = build_engine(
            experiment.engine,
            session,
            parts.task,
            parts.data,
            folder.memory,
            experiment.cohort,
            experiment.precision,  # type: ignore[arg-type]
            tell,
        )
    ran = f"engine {engine.name} ({experiment.engine} was asked for): {engine.why}"
    (tell if _surprising(experiment.engine, engine.name) else folder.log)(ran)
    if session.program.private and not personal:
        tell("no accuracy is measured: parts of the model are private, and --personal was not asked for")
    started = time.perf_counter()
    for result in run_rounds(session, engine, schedule, personal, folder.progress):
        seconds = time.perf_counter() - started
        timing = {"seconds": seconds, "clients_per_second": len(result.cohort) / seconds}
        folder.save(result, timing, f"{engine.name}: {engine.why}")
        for client, reason in result.refused:
            tell(f"round {result.number}: client {client} refused: {reason}")
        for note in result.notes:
            tell(note)
        if watch is not None:
            watch(result, timing)
        started = time.perf_counter()
    folder.log(f"engine {engine.name}: {engine.why}")


def _surprising(asked: str, ran: str) -> bool:
    """Not the one that was asked for; or, with a GPU at hand, one that does not use it."""
    return asked != ran if asked != "auto" else ran == "sequential" and torch.cuda.is_available()


def _refuse_on_nodes(path: Path) -> None:
    """RunError where what clients keep is on Flower's nodes: no engine here could go on with it."""
    if (path / NODES).exists():
        raise RunError(
            f"what the clients of {path} keep is on Flower's nodes ({NODES} names the run there): go on with "
            "--engine flower, or with the same `flwr run`."
        )


def _model_of(experiment: Experiment, parts: Parts) -> dict[str, object]:
    train = parts.data.train
    return {"name": experiment.model, "classes": train.classes, "shape": list(train.shape)}
