"""Run an experiment into a folder, or go on with one."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedpara.engines.client import Protocol
from fedpara.engines.loop import Round, Schedule, play
from fedpara.engines.simulate import build_engine, prepare
from fedpara.experiments.build import Parts, build
from fedpara.experiments.config import Experiment
from fedpara.experiments.store import RunFolder, Summary, create, open_run, read_config, read_run

Watcher = Callable[[Round, dict[str, float]], None]
Speaker = Callable[[str], None]


def run(
    experiment: Experiment,
    path: Path,
    *,
    data_dir: Path | None = None,
    watch: Watcher | None = None,
    say: Speaker | None = None,
) -> Summary:
    """A new run folder, filled. Everything is checked before the folder is made: a mistake leaves nothing behind."""
    parts = build(experiment, data_dir)
    _prepared(experiment, parts)
    return _go(parts, create(path, experiment, _model_of(experiment, parts)), watch, say)


def lay_out(experiment: Experiment, path: Path, *, data_dir: Path | None = None) -> None:
    """The folder of a run that has not begun; `resume` begins it."""
    parts = build(experiment, data_dir)
    _prepared(experiment, parts)
    create(path, experiment, _model_of(experiment, parts)).close()


def resume(
    path: Path,
    *,
    rounds: int | None = None,
    engine: str | None = None,
    data_dir: Path | None = None,
    watch: Watcher | None = None,
    say: Speaker | None = None,
) -> Summary:
    """Go on where the folder's last checkpoint is, to the same bits as if it had never stopped."""
    experiment = read_config(path)
    if rounds is not None:
        experiment = replace(experiment, rounds=rounds)
    if engine is not None:
        experiment = replace(experiment, engine=engine)
    parts = build(experiment, data_dir)
    return _go(parts, open_run(path, experiment), watch, say)


def _prepared(experiment: Experiment, parts: Parts) -> tuple[Protocol, Schedule, bool]:
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
        evaluate_every=experiment.evaluate_every,
        personal=experiment.personal,
        max_norm=experiment.max_norm,
        target=experiment.target,
    )


def _go(parts: Parts, folder: RunFolder, watch: Watcher | None, say: Speaker | None) -> Summary:
    def tell(text: str) -> None:
        folder.log(text)
        if say is not None:
            say(text)

    try:
        for note in folder.notes:
            tell(note)
        if folder.progress:
            tell(f"resumed after round {folder.progress.round}")
        if not folder.finished:
            _play(parts, folder, watch, tell)
    except BaseException as error:
        folder.log(f"stopped: {type(error).__name__}: {error}")
        raise
    finally:
        folder.close()
    return read_run(folder.path)


def _play(parts: Parts, folder: RunFolder, watch: Watcher | None, tell: Speaker) -> None:
    experiment = folder.experiment
    protocol, schedule, personal = _prepared(experiment, parts)
    engine = build_engine(
        experiment.engine, protocol, parts.task, parts.data, folder.memory, experiment.cohort
    )
    tell(f"engine {engine.name} ({experiment.engine} was asked for): {engine.why}")
    if protocol.program.private and not personal:
        tell("no accuracy is measured: parts of the model are private, and --personal was not asked for")
    started = time.perf_counter()
    for result in play(protocol, engine, schedule, personal, folder.progress):
        seconds = time.perf_counter() - started
        timing = {"seconds": seconds, "clients_per_second": len(result.cohort) / seconds}
        folder.save(result, timing)
        for client, reason in result.refused:
            tell(f"round {result.number}: client {client} refused: {reason}")
        for note in result.notes:
            tell(note)
        if watch is not None:
            watch(result, timing)
        started = time.perf_counter()


def _model_of(experiment: Experiment, parts: Parts) -> dict[str, object]:
    train = parts.data.train
    return {"name": experiment.model, "classes": train.classes, "shape": list(train.shape)}
