"""Make a table or figure of the paper: run missing runs, resume interrupted ones, skip finished ones."""

import fnmatch
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpara.choices import PAPER_RESULTS, PAPER_RUNS
from fedpara.engines.distributed.process_group import join
from fedpara.errors import ConfigError, FedParaError, RunError, of_several
from fedpara.experiments.config import Experiment
from fedpara.experiments.config_file import with_values
from fedpara.experiments.paper import changes, merged, run_name, study
from fedpara.experiments.run import OnRound, resume, run
from fedpara.experiments.storage.catalog import Library, archive_run, cut, finished
from fedpara.experiments.storage.summary import Summary, read_config
from fedpara.experiments.studies.sweep import take_up
from fedpara.experiments.studies.tune import Play, Played

logger = logging.getLogger(__name__)

FEW = 4
"""The largest number of runs that an error names."""
Begin = Callable[[str, Experiment], OnRound | None]
"""Called with a run's name and experiment before it starts. The returned function is called after each round."""


@dataclass(frozen=True)
class Job:
    """One run that a study needs, with its finished or resumable run folder, if any."""

    name: str
    experiment: Experiment
    found: Summary | None
    resumable: Path | None


def jobs(
    names: Sequence[str],
    library: Library,
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    only: str | None = None,
    scale: str = "paper",
) -> list[Job]:
    """Every run that the named studies need, once; the first seed of all runs comes before the second of any."""
    wanted: list[Experiment] = []
    most = max((seeds or study(name).seeds for name in names), default=0)
    for seed in range(most):
        for name in names:
            if seed < (seeds or study(name).seeds):
                wanted += study(name).changed(changes(seed, rounds, scale)).experiments
    listed = [Job(run_name(e), e, library.find(e), library.resumable(e)) for e in merged(wanted)]
    return [job for job in listed if only is None or matches(only, job.name)]


def matches(pattern: str, name: str) -> bool:
    """Whether the name contains the pattern, or matches it as a shell pattern."""
    return pattern.lower() in name.lower() or fnmatch.fnmatch(name.lower(), pattern.lower())


def carry_out(
    names: Sequence[str],
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    only: str | None = None,
    scale: str = "paper",
    out: Path = PAPER_RUNS,
    finished_in: Sequence[Path] = (PAPER_RESULTS,),
    data_dir: Path | None = None,
    engine: str | None = None,
    precision: str | None = None,
    device: str | None = None,
    begin: Begin | None = None,
    play: Play | None = None,
) -> list[Summary]:
    """The finished runs of the named studies. Runs found under `out` or `finished_in` are not repeated.

    ConfigError if `only` matches none of them. If a run fails, or its folder cannot be read, the others still run;
    RunError at the end names it.
    """
    library = Library.of(out, *finished_in)
    listed = jobs(names, library, seeds=seeds, rounds=rounds, only=only, scale=scale)
    if only is not None and not listed:
        every = [job.name for job in jobs(names, library, seeds=seeds, rounds=rounds, scale=scale)]
        raise ConfigError(_no_match(only, names, every))
    given = {"engine": engine, "precision": precision, "device": device}
    return run_jobs(listed, library, out, data_dir=data_dir, given=given, begin=begin, play=play)


def run_jobs(
    listed: Sequence[Job],
    library: Library,
    out: Path,
    *,
    data_dir: Path | None = None,
    given: Mapping[str, str | None],
    begin: Begin | None = None,
    play: Play | None = None,
) -> list[Summary]:
    """The finished runs of the jobs: those of the library, and the missing ones, which get folders in `out`.

    `given` are the engine, precision and device, where the caller chose one. `play` carries out the missing runs;
    without it they run in turn. If a run fails, or its folder cannot be read, the others still run; RunError at the end
    names it.
    """
    damaged = {path.name: error for path, error in library.damaged.items()}
    for name in damaged.keys() - {job.name for job in listed}:
        logger.info("left out: %s", damaged[name])
    # All ranks list the runs before rank 0 makes a folder: another rank would take it for an interrupted run.
    join().gather("the list of runs")
    for job in listed:
        if job.found is not None and any(given.values()):
            found = job.found
            logger.info("%s is in %s and not run again; it ran %s", job.name, found.path, found.engine)
    missing = [job for job in listed if job.found is None]
    failed: dict[str, FedParaError] = {job.name: damaged[job.name] for job in missing if job.name in damaged}
    left = [job for job in missing if job.name not in failed]
    carried = (
        _played(left, out, data_dir, given, play) if play else _in_turn(left, out, data_dir, given, begin)
    )
    done, failed = carried[0], failed | carried[1]
    if failed:
        raise of_several(failed, len(listed))
    return [job.found or cut(done[job.name], job.experiment.rounds) for job in listed]


def _in_turn(
    jobs: Sequence[Job],
    out: Path,
    data_dir: Path | None,
    given: Mapping[str, str | None],
    begin: Begin | None,
) -> Played:
    done: dict[str, Summary] = {}
    failed: dict[str, FedParaError] = {}
    for job in jobs:
        on_round = begin(job.name, job.experiment) if begin else None
        try:
            done[job.name] = _run_job(job, out, data_dir, given, on_round)
        except RunError as error:
            failed[job.name] = error
    return done, failed


def _played(
    jobs: Sequence[Job], out: Path, data_dir: Path | None, given: Mapping[str, str | None], play: Play
) -> Played:
    """Every run gets a folder, with the given engine, precision and device, and `play` resumes it."""
    paths: dict[str, Path] = {}
    failed: dict[str, FedParaError] = {}
    for job in jobs:
        path = job.resumable or out / job.name
        there = job.experiment if job.resumable is None else read_config(path)
        values = {"rounds": job.experiment.rounds} | {name: v for name, v in given.items() if v is not None}
        try:
            take_up({path: with_values(there, values)}, data_dir)
        except RunError as error:
            failed[job.name] = error
        else:
            paths[job.name] = path
    done, broken = play(paths)
    return done, failed | broken


def _no_match(only: str, names: Sequence[str], runs: Sequence[str]) -> str:
    which = ", ".join(names)
    if not runs:
        return f"--only {only!r}: {which} is computed and needs no run. Leave --only out."
    few = ", ".join(runs[:FEW]) + (", ..." if len(runs) > FEW else "")
    return (
        f"--only {only!r}: no run of {which} has this in its name or matches it as a pattern. The {len(runs)} runs are "
        f"{few}"
    )


def _run_job(
    job: Job,
    out: Path,
    data_dir: Path | None,
    given: Mapping[str, str | None],
    on_round: OnRound | None,
) -> Summary:
    """Run or resume the job with the given engine, precision and device."""
    if job.resumable is not None:
        return resume(
            job.resumable,
            rounds=job.experiment.rounds,
            data_dir=data_dir,
            on_round=on_round,
            engine=given["engine"],
            precision=given["precision"],
            device=given["device"],
        )
    experiment = with_values(job.experiment, {name: v for name, v in given.items() if v is not None})
    return run(experiment, out / job.name, data_dir=data_dir, on_round=on_round)


def archive_finished(out: Path, into: Path) -> list[Path]:
    """Copies every finished run under `out`, without checkpoints. RunError at the end if one cannot be read."""
    library = Library.of(out)
    archived = [archive_run(s.path, into) for s in library if finished(s, s.experiment.rounds)]
    library.refuse_damaged("archived")
    return archived
