"""`fedpara.simulate`: a run of Python objects, in memory or into a resumable run folder."""

import inspect
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from fedpara import engines
from fedpara.algorithms import Algorithm
from fedpara.data import FederatedData
from fedpara.engines.distributed.process_group import join
from fedpara.engines.progress import Round
from fedpara.engines.result import Run
from fedpara.engines.settings import Settings
from fedpara.engines.simulate import prepare, refuse_flower_engine, with_own_test, without_tensors
from fedpara.errors import ConfigError
from fedpara.experiments.build import Parts
from fedpara.experiments.config import FREE, Experiment
from fedpara.experiments.follower import open_on_ranks
from fedpara.experiments.object_digests import as_experiment, digests
from fedpara.experiments.run import Prepared, describe_run, run_folder
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.client_scores import read_client_scores
from fedpara.experiments.storage.metrics_line import round_of
from fedpara.experiments.storage.run_folder import RunFolder, create, open_run
from fedpara.experiments.storage.summary import read_config, read_run
from fedpara.tasks import Task
from fedpara.wire import Link


def simulate(
    task: Task,
    data: FederatedData,
    algorithm: Algorithm,
    *,
    out: str | PathLike[str] | None = None,
    **how: Any,
) -> Run:
    """Run `algorithm` on the federation, in memory or into the run folder `out`.

    `how` are the keywords of `fedpara.engines.simulate`, such as `rounds` and `cohort`.

    With `out`, every round is saved. The same call resumes an interrupted run with the same bits, and returns at once
    if the run is finished. The model must have the same initial weights: seed torch before you build it.
    """
    _check_kinds(task, data, algorithm, how.get("link"))
    if out is None:
        return engines.simulate(task, data, algorithm, **how)
    return _into(Path(out), task, data, algorithm, **how)


_OF_ENGINES = inspect.signature(engines.simulate)
simulate.__signature__ = _OF_ENGINES.replace(  # type: ignore[attr-defined]
    parameters=[*_OF_ENGINES.parameters.values(), inspect.signature(simulate).parameters["out"]]
)


def _into(
    path: Path,
    task: Task,
    data: FederatedData,
    algorithm: Algorithm,
    *,
    link: Link | None = None,
    memory: object = None,
    on_round: Any = None,
    **how: Any,
) -> Run:
    if memory is not None:
        raise ConfigError("memory and out are both given: a run folder holds the client memories itself.")
    settings = Settings(**how, link=link or Link())
    refuse_flower_engine(settings.engine)
    task = with_own_test(task, data)
    parts = Parts(task, data, algorithm, settings.link, own_clients=True)
    prepared = Prepared(*prepare(task, data, algorithm, settings), settings)
    session, schedule, personal, _ = prepared
    experiment = as_experiment(task, data, algorithm, settings, personal, session.program)

    def opened() -> RunFolder:
        if (path / "config.toml").exists():
            _refuse_other(path, experiment)
            return open_run(path, experiment, parts.digest)
        return create(path, experiment, *describe_run(experiment, parts, session))

    fresh: dict[int, Round] = {}

    def keep(result: Round, timing: dict[str, float]) -> object:
        fresh[result.number] = without_tensors(result)
        return None if on_round is None else on_round(result)

    group = join()
    with group.in_step(f"the end of {path}"):
        folder = open_on_ranks(group, path, experiment, opened)
        run_folder(group, parts, prepared, folder, keep)
    summary, progress = read_run(path), final_checkpoint(path).progress
    scores = read_client_scores(path)
    rounds = [
        fresh.get(t) or round_of(line, schedule, session.seed, scores.get(t))
        for t, line in ((line["round"], line) for line in summary.metrics)
    ]
    rounds[-1] = replace(rounds[-1], progress=progress)
    return Run(session, folder.memory, tuple(rounds), summary.engine or "", len(data))


def _check_kinds(task: object, data: object, algorithm: object, link: object) -> None:
    """ConfigError for common mistakes: a model, a name or a function in place of these objects."""
    for name, given, kind, such in (
        ("task", task, Task, "fp.Task(model, test=test)"),
        ("data", data, FederatedData, "fp.FederatedData(train, clients)"),
        ("algorithm", algorithm, Algorithm, "algorithms.fedavg(lr=0.1)"),
        ("link", Link() if link is None else link, Link, 'fp.Link(up="int8")'),
    ):
        if not isinstance(given, kind):
            told = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
            article = "an" if name[0] == "a" else "a"
            raise ConfigError(f"{name} is {told}: expected {article} {kind.__name__}, such as {such}.")


def _refuse_other(path: Path, asked: Experiment) -> None:
    """ConfigError if the folder holds a run of other objects."""
    there = read_config(path)
    if there.identity == asked.identity:
        return
    if there.objects is None:
        raise ConfigError(
            f"{path} holds a run of a config: choose another folder, or resume it with `fedpara resume`."
        )
    before, now = digests(there.objects), digests(asked.objects or "")
    changed = [f"the {part}" for part in now if before.get(part) != now[part]]
    changed += [
        f"{name} ({value!r} there, {getattr(asked, name)!r} here)"
        for name, value in vars(there).items()
        if value != getattr(asked, name) and name not in ("objects", *FREE)
    ]
    raise ConfigError(
        f"{path} holds another run: {', '.join(changed)} differ. Choose another folder, or pass the same objects; seed "
        "torch before you build the model."
    )
