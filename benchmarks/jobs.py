"""What does a short run cost beside its training? The first trials of a prepared study of small networks.

    python benchmarks/jobs.py --data-dir DIR           seconds per run: in processes of their own, and in one process
    python benchmarks/jobs.py --data-dir DIR --steps   on a GPU: the start and a step of each method, compiled or not

Runs go one at a time. The compiler's cache is empty at the start of each part.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedpara.apps.studies.jobs import player
from fedpara.engines.batched.engine import Batched
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.simulate import prepare
from fedpara.experiments import Experiment, read_run
from fedpara.experiments.build import build
from fedpara.experiments.run import _settings, lay_out_all
from fedpara.experiments.studies.tune import trial_runs
from fedpara.experiments.studies.tuned.plans import TUNINGS


def compare(runs: dict[str, Experiment], folder: Path, data_dir: Path | None) -> None:
    ways: dict[str, Callable[[dict[str, Path]], object]] = {
        "processes of their own": lambda paths: _alone(paths, data_dir),
        "one process": lambda paths: _together(paths, data_dir),
    }
    for number, (way, play) in enumerate(ways.items()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"compiled{number}")
        paths = {name: folder / str(number) / name for name in runs}
        lay_out_all({paths[name]: experiment for name, experiment in runs.items()}, data_dir=data_dir)
        began = time.perf_counter()
        play(paths)
        whole = time.perf_counter() - began
        rounds = sum(read_run(path).seconds for path in paths.values())
        rest = (whole - rounds) / len(paths)
        print(
            f"{way}: {len(paths)} runs {whole:.1f} s, rounds {rounds:.1f} s, the rest {rest:.2f} s per run",
            flush=True,
        )


def _alone(paths: dict[str, Path], data_dir: Path | None) -> None:
    where = ["--data-dir", str(data_dir)] if data_dir else []
    for path in paths.values():
        words = [sys.executable, "-P", "-m", "fedpara", "resume", str(path), *where]
        subprocess.run(words, check=True, capture_output=True)


def _together(paths: dict[str, Path], data_dir: Path | None) -> None:
    with player(1, 60, data_dir, engines={"auto"}) as play:
        assert play is not None
        play(paths)


def steps(methods: dict[str, Experiment], folder: Path, data_dir: Path | None, count: int) -> None:
    import torch._dynamo  # noqa: F401  # as the first gradient would

    for name, experiment in methods.items():
        for compiled in (False, True):
            for start in ("first", "second") if compiled else ("first",):
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
                began = time.perf_counter()
                tick = _engine(experiment, data_dir, compiled).one_tick()
                tick()
                _wait()
                ready = time.perf_counter()
                for _ in range(count):
                    tick()
                _wait()
                each = 1000 * (time.perf_counter() - ready) / count
                way = f"compiled, {start} time" if compiled else "captured only"
                print(
                    f"{name}, {way}: {ready - began:.2f} s to the first step, {each:.3f} ms per step",
                    flush=True,
                )


def _engine(experiment: Experiment, data_dir: Path | None, compiled: bool) -> Batched:
    parts = build(experiment, data_dir)
    session, schedule, _ = prepare(parts.task, parts.data, parts.algorithm, _settings(experiment, parts))
    cohorts = Cohorts(session.cohort_seed, len(parts.data), experiment.cohort, schedule.sampler)
    return Batched(session, parts.task, parts.data, InMemory(), cohorts=cohorts, compile=compiled)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tuning", default="personal-1", choices=TUNINGS)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, nargs="?", const=1000, help="time so many steps instead")
    given = parser.parse_args()
    tuning = TUNINGS[given.tuning]
    runs = dict(list(trial_runs(tuning.trials, tuning.seeds).items())[: given.runs])
    runs = {name: replace(experiment, rounds=given.rounds) for name, experiment in runs.items()}
    with TemporaryDirectory() as folder:
        if given.steps:
            first = {name.partition("-")[0]: e for name, e in reversed(runs.items())}
            steps(first, Path(folder), given.data_dir, given.steps)
        else:
            compare(runs, Path(folder), given.data_dir)


if __name__ == "__main__":
    main()
