"""`fedpara reproduce tuned-NAME`: a prepared study. Trials choose settings by validation, then final runs follow.

Archived runs are not repeated, so a study can continue on a machine that has only the archive.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from fedpara.apps.run import run_all
from fedpara.apps.studies.jobs import player
from fedpara.apps.studies.tune import json_of_tuned, print_tuned
from fedpara.choices import TUNED
from fedpara.engines.distributed.process_group import join
from fedpara.errors import ConfigError, FedParaError, RunError
from fedpara.experiments import Experiment, Summary
from fedpara.experiments.config_file import with_values
from fedpara.experiments.paper import run_name
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.reproduce import Job, archive_finished, matches, run_jobs
from fedpara.experiments.studies.tune import Play, Tuned, final_runs, trial_runs, tune
from fedpara.experiments.studies.tuned.archive import archive_tuning, restore, restore_choice
from fedpara.experiments.studies.tuned.plan import Plan, Setting, Tuning, setting_for
from fedpara.experiments.studies.tuned.plans import PLANS, plan_of
from fedpara.report.tuned_studies import settings, tuned_studies

PAPER = "paper"
"""The folder of reused experiments, in `out` and in the archive."""


@dataclass(frozen=True)
class Place:
    """The folders of new runs, of finished runs to reuse, and of the archive."""

    out: Path
    results: Path
    keep: Path | None
    data_dir: Path | None

    @property
    def library(self) -> Library:
        return Library.of(self.out, self.results)


def tuned(
    names: Sequence[str],
    seeds: int | None,
    only: str | None,
    scale: str,
    place: Place,
    given: dict[str, str | None],
    jobs: int,
    minutes: float | None,
    as_json: bool,
) -> None:
    """Executes the missing runs of the named plans. `given` are the engine, precision and device."""
    plans = [_selected(plan_of(name, scale), only) for name in names]
    if not any(plan.tunings or plan.reused for plan in plans):
        raise ConfigError(f"--only {only!r}: {', '.join(names)} has no such part. {_parts(names)}")
    values = {name: value for name, value in given.items() if value is not None}
    shown: dict[str, Any] = {}
    failed: dict[str, FedParaError] = {}
    with player(jobs, minutes, place.data_dir, engines={given["engine"] or "auto"}) as played:
        play = played or (lambda paths: run_all(paths, place.data_dir, "none"))
        for plan in plans:
            with _kept(plan, place):
                for tuning in plan.tunings:
                    try:
                        found = _tune(tuning, place, values, tuning.finals(seeds), play)
                    except RunError as error:
                        failed[tuning.name] = error
                        continue
                    shown[tuning.name] = [json_of_tuned(one) for one in found]
                    if not as_json and not join().rank:
                        typer.echo(f"{tuning.name}: {place.out / tuning.name}")
                        print_tuned(found)
                if plan.reused and not failed:
                    runs = _run_reused(
                        plan, place, values, plan.seeds if seeds is None else range(1, seeds + 1), scale, play
                    )
                    shown[f"{TUNED}{plan.name}"] = {run.path.name: run.final for run in runs}
                    if not as_json and not join().rank:
                        for run in runs:
                            score = "no score" if run.final is None else run.metric.text(run.final)
                            typer.echo(f"{run.path.name}: {score}")
    if failed:
        raise RunError(" ".join(f"{name}: {error}" for name, error in failed.items()))
    if as_json and not join().rank:
        typer.echo(json.dumps(shown))


def _selected(plan: Plan, only: str | None) -> Plan:
    """The plan with those tunings and runs whose name contains `only` or matches it."""
    if only is None:
        return plan
    return replace(
        plan,
        tunings=tuple(tuning for tuning in plan.tunings if matches(only, tuning.name)),
        reused=tuple(e for e in plan.reused if matches(only, run_name(e))),
    )


def _parts(names: Sequence[str]) -> str:
    parts = [tuning.name for name in names for tuning in PLANS[name].tunings]
    parts += [run_name(e) for name in names for e in PLANS[name].reused]
    return f"Its parts are {', '.join(parts)}."


def _tune(
    tuning: Tuning, place: Place, values: Mapping[str, Any], final_seeds: Sequence[int], play: Play
) -> list[Tuned]:
    """Makes the choice before it searches the archive for final runs, because the choice decides which these are."""
    folder = place.out / tuning.name
    methods = {name: with_values(e, dict(values)) for name, e in tuning.methods.items()}

    def call(seeds: Sequence[int]) -> list[Tuned]:
        return tune(
            methods,
            folder,
            tuning.grid,
            own=tuning.own,
            one_at_a_time=tuning.one_at_a_time,
            validation=tuning.validation,
            rounds=tuning.rounds,
            seeds=tuning.seeds,
            final_seeds=seeds,
            data_dir=place.data_dir,
            play=play,
        )

    if not join().rank:
        restore(folder / "trials", trial_runs(tuning.trials, tuning.seeds), place.library)
        restore_choice(tuning.name, folder, place.results)
    join().gather("the archived trials")
    choices = {one.method: one.choice for one in call(())}
    lengths = {name: experiment.rounds for name, experiment in methods.items()}
    if not join().rank:
        restore(folder / "final", final_runs(choices, lengths, final_seeds), place.library)
    join().gather("the archived final runs")
    return call(final_seeds)


def _run_reused(
    plan: Plan, place: Place, values: Mapping[str, Any], seeds: Sequence[int], scale: str, play: Play
) -> list[Summary]:
    library = place.library
    known = settings(tuned_studies(library), scale)
    jobs: list[Job] = []
    for seed in seeds:
        for experiment in plan.reused:
            one = replace(_with_setting(experiment, known, plan), seed=seed)
            jobs.append(Job(run_name(one), one, library.find(one), library.resumable(one)))
    given = {name: values.get(name) for name in ("engine", "precision", "device")}
    return run_jobs(jobs, library, place.out / PAPER, data_dir=place.data_dir, given=given, play=play)


def _with_setting(experiment: Experiment, known: Sequence[Setting], plan: Plan) -> Experiment:
    _, applied = setting_for(experiment, known)
    if applied is None:
        first = next(
            f"{TUNED}{p.name}" for p in PLANS.values() if any(t.name in plan.needs for t in p.tunings)
        )
        raise ConfigError(
            f"{run_name(experiment)} reuses the setting of its method, which is not chosen yet: run {first} first."
        )
    return applied


@contextmanager
def _kept(plan: Plan, place: Place) -> Iterator[None]:
    """Archives finished runs when the block ends, even if a run failed or was interrupted."""
    try:
        yield
    finally:
        if place.keep is not None and not join().rank:
            for tuning in plan.tunings:
                archive_tuning(tuning.name, place.out / tuning.name, place.keep)
            if plan.reused:
                archive_finished(place.out / PAPER, place.keep / PAPER)
