"""Carry out a table or figure of the paper: run what is missing, go on with what was cut, skip what is there.

    python -m fedpara.experiments.reproduce capacity-cnn --seeds 3 --out runs/paper --data-dir data
    python -m fedpara.experiments.reproduce --keep results/paper --out runs/paper

The second line copies every finished run to its small form. Needs torch, numpy and safetensors, nothing else.
"""

import argparse
import fnmatch
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedpara.choices import PAPER_RESULTS, PAPER_RUNS
from fedpara.engines.distributed.process_group import join
from fedpara.engines.progress import Round
from fedpara.errors import ConfigError, FedParaError, RunError, of_several
from fedpara.experiments.config import Experiment, with_values
from fedpara.experiments.paper import changes, merged, run_name, study
from fedpara.experiments.run import Speaker, Watcher, resume, run
from fedpara.experiments.storage.catalog import Library, cut, finished, save_small
from fedpara.experiments.storage.summary import Summary

FEW = 4
"""Runs that a text names before it stops at dots."""
Begin = Callable[[str, Experiment], Watcher | None]
"""Called as a run begins, with its name; what it returns watches the rounds."""


@dataclass(frozen=True)
class Job:
    """One run that a study needs, and what is there of it."""

    name: str
    experiment: Experiment
    found: Summary | None
    begun: Path | None


def jobs(
    names: Sequence[str],
    library: Library,
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    only: str | None = None,
    scale: str = "paper",
) -> list[Job]:
    """Every run the named studies need, once, the first seed of all of them before the second of any."""
    wanted: list[Experiment] = []
    most = max((seeds or study(name).seeds for name in names), default=0)
    for seed in range(most):
        for name in names:
            if seed < (seeds or study(name).seeds):
                wanted += study(name).changed(changes(seed, rounds, scale)).experiments
    listed = [Job(run_name(e), e, library.find(e), library.begun(e)) for e in merged(wanted)]
    return [job for job in listed if only is None or matches(only, job.name)]


def matches(pattern: str, name: str) -> bool:
    """A piece of the name, or a shell pattern for all of it."""
    return pattern.lower() in name.lower() or fnmatch.fnmatch(name.lower(), pattern.lower())


def carry_out(
    names: Sequence[str],
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    only: str | None = None,
    scale: str = "paper",
    out: Path = PAPER_RUNS,
    kept: Sequence[Path] = (PAPER_RESULTS,),
    data_dir: Path | None = None,
    engine: str | None = None,
    precision: str | None = None,
    begin: Begin | None = None,
    say: Speaker | None = None,
) -> list[Summary]:
    """The runs of the named studies, finished. Those found under `out` or `kept` are not run again.

    ConfigError where `only` fits none of them. A run that fails (it diverged) does not keep the others from being
    run; RunError at the end names it. Nor does a folder that cannot be read, which fails the run it is named for.
    """
    library = Library.of(out, *kept)
    summaries: list[Summary] = []
    failed: dict[str, FedParaError] = {}
    listed = jobs(names, library, seeds=seeds, rounds=rounds, only=only, scale=scale)
    if only is not None and not listed:
        every = [job.name for job in jobs(names, library, seeds=seeds, rounds=rounds, scale=scale)]
        raise ConfigError(_no_match(only, names, every))
    damaged = {path.name: error for path, error in library.damaged.items()}
    if say is not None and join().rank == 0:
        for name in damaged.keys() - {job.name for job in listed}:
            say(f"left out: {damaged[name]}")
    # Before rank 0 makes a folder that another would take for one begun earlier.
    join().gather("the list of runs")
    for job in listed:
        if job.found is not None:
            if say is not None and (engine or precision):
                say(f"{job.name} is in {job.found.path} and not run again; it ran {job.found.engine}")
            summaries.append(job.found)
            continue
        if job.name in damaged:
            failed[job.name] = damaged[job.name]
            continue
        watch = begin(job.name, job.experiment) if begin else None
        try:
            summary = _done(job, out, data_dir, engine, precision, watch, say)
        except RunError as error:
            failed[job.name] = error
            continue
        summaries.append(cut(summary, job.experiment.rounds))
    if failed:
        raise of_several(failed, len(listed))
    return summaries


def _no_match(only: str, names: Sequence[str], runs: Sequence[str]) -> str:
    which = ", ".join(names)
    if not runs:
        return f"--only {only!r}: {which} needs no run, it is computed. Leave --only out."
    few = ", ".join(runs[:FEW]) + (", ..." if len(runs) > FEW else "")
    return (
        f"--only {only!r}: no run of {which} has that in its name or fits it as a pattern. Expected a piece of one of "
        f"the {len(runs)} names: {few}"
    )


def _done(
    job: Job,
    out: Path,
    data_dir: Path | None,
    engine: str | None,
    precision: str | None,
    watch: Watcher | None,
    say: Speaker | None,
) -> Summary:
    if job.begun is not None:
        return resume(
            job.begun,
            rounds=job.experiment.rounds,
            engine=engine,
            precision=precision,
            data_dir=data_dir,
            watch=watch,
            say=say,
        )
    given = {"engine": engine, "precision": precision}
    experiment = with_values(job.experiment, {name: v for name, v in given.items() if v is not None})
    return run(experiment, out / job.name, data_dir=data_dir, watch=watch, say=say)


def keep_finished(out: Path, into: Path) -> list[Path]:
    """The small form of every finished run under `out`. RunError at the end where one cannot be read."""
    library = Library.of(out)
    kept = [save_small(s.path, into) for s in library if finished(s, s.experiment.rounds)]
    library.refuse_damaged("kept")
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fedpara.experiments.reproduce",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only")
    parser.add_argument("--scale", default="paper")
    parser.add_argument("--out", type=Path, default=PAPER_RUNS)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--engine")
    parser.add_argument("--precision")
    parser.add_argument("--keep", type=Path, help="copy finished runs to their small form here")
    given = vars(parser.parse_args(arguments))
    for name in ("seeds", "rounds"):
        if given[name] is not None and given[name] < 1:
            parser.error(f"--{name} is {given[name]}: expected at least 1.")
    names, keep, out = given.pop("names"), given.pop("keep"), given["out"]

    def begin(name: str, experiment: Experiment) -> Watcher:
        print(f"{name}: {experiment.rounds} rounds", flush=True)

        def watch(result: Round, timing: dict[str, float]) -> None:
            if result.accuracy is not None:
                print(
                    f"{name}: round {result.number} accuracy {result.accuracy:.4f} {timing['seconds']:.1f} s",
                    flush=True,
                )

        return watch

    try:
        if names:
            carry_out(names, begin=begin, say=print, **given)
        if keep is not None:
            for path in keep_finished(out, keep):
                print(path)
        sys.stdout.flush()
    except FedParaError as error:
        sys.exit(f"{parser.prog}: {error}")
    except OSError as error:
        # Who read what was said has enough, or the disk has. Python tries again as it ends.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        print("interrupted: what was finished is saved, the same command goes on with it.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
