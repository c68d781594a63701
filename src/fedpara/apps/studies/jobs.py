"""`--jobs` and `--minutes`: the runs of a study in processes side by side.

Each process resumes run folders that the study has laid out, one after another. What a run prints goes to output.txt in
its folder. Runs that differ only in numbers that a program reads, such as the seed and the learning rate, share a
compiled program, which is cached on disk: one of them starts first, and the others wait until it has finished a round.
A process prefers runs whose program it has loaded already.
"""

import os
import re
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedpara.apps.flower.processes import Processes
from fedpara.apps.studies.run_processes import RunProcess, RunProcesses
from fedpara.apps.terminal.progress import say
from fedpara.engines.distributed.process_group import join
from fedpara.errors import FedParaError, UsageError
from fedpara.experiments import Experiment, Summary, read_run
from fedpara.experiments.storage.jsonl import raw_lines
from fedpara.experiments.storage.summary import read_config
from fedpara.experiments.studies.tune import Play, Played

POLL = 0.1
"""Seconds between two checks of the runs."""
THREADS = "OMP_NUM_THREADS"
READ = (
    *("seed", "lr", "lr_decay", "init", "privacy_seed", "epochs", "steps", "validation"),
    *("link_up", "link_down", "aggregation_error", "robust", "attack", "hostile"),
)
"""Fields that a compiled program does not depend on."""


@contextmanager
def player(
    jobs: int, minutes: float | None, data_dir: Path | None, track: str = "none", *, engines: set[str]
) -> Iterator[Play | None]:
    """A function that executes runs in at most `jobs` processes, or None if this process should execute them.

    It stops when `minutes` have passed since this call. The processes end with the block. `engines` are those of the
    runs. Each process gets its share of the threads unless OMP_NUM_THREADS is set.
    """
    if jobs == 1 and minutes is None:
        yield None
        return
    if join().size > 1:
        raise UsageError("--jobs and --minutes start their own processes: use them without torchrun.")
    if "flower" in engines:
        raise UsageError("--engine flower starts its own processes: use it without --jobs and --minutes.")
    if THREADS not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))  # new run folders record this number
    environment = {THREADS: str(torch.get_num_threads()), **os.environ}
    options = ["--track", track, "--json", *(["--data-dir", str(data_dir)] if data_dir else [])]
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with Processes() as processes:
        pool = RunProcesses(processes, jobs, options, environment)
        try:
            yield lambda paths: _play(paths, pool, jobs, end)
        finally:
            pool.leave()


@dataclass(frozen=True)
class Running:
    """A run that had finished `rounds` rounds before `process` resumed it."""

    path: Path
    program: str
    rounds: int
    process: RunProcess

    @property
    def trains(self) -> bool:
        """Whether it has finished a round."""
        return _rounds(self.path) > self.rounds


def _play(paths: Mapping[str, Path], pool: RunProcesses, jobs: int, end: float | None) -> Played:
    """The finished runs and the errors of the failed ones. KeyboardInterrupt if runs are left at the end."""
    programs = {name: _program(read_config(path)) for name, path in paths.items()}
    order = list(paths)
    waiting, running, compiled = list(paths), dict[str, Running](), set[str]()
    done: dict[str, Summary] = {}
    failed: dict[str, FedParaError] = {}
    try:
        while waiting or running:
            if end is not None and time.monotonic() >= end:
                say(f"the minutes are over: {len(waiting) + len(running)} of {len(paths)} runs are left.")
                raise KeyboardInterrupt
            pool.prepare(len(waiting), len(running))
            compiled |= {run.program for run in running.values() if run.trains}
            starting = {run.program for run in running.values()} - compiled
            ready = [name for name in waiting if programs[name] not in starting]
            if ready and pool.idle:
                process = pool.idle.pop(0)
                near = order[order.index(waiting[0]) :][:jobs]
                name = _choose(ready, near, programs, process)
                waiting.remove(name)
                running[name] = Running(paths[name], programs[name], _rounds(paths[name]), process)
                process.give(paths[name], programs[name])
                continue
            select.select([run.process.answers for run in running.values()], [], [], POLL)
            for name, run in list(running.items()):
                code = run.process.code()
                if code is None:
                    continue
                del running[name]
                pool.take_back(run.process)
                if code:
                    failed[name] = run.process.error(code)
                    told = f"failed: {failed[name]}"
                else:
                    done[name] = read_run(run.path)
                    told = _facts(done[name])
                say(f"{len(done) + len(failed)}/{len(paths)} {name}: {told}")
    except KeyboardInterrupt:
        pool.interrupt(run.process for run in running.values())
        raise
    return done, failed


def _program(experiment: Experiment) -> str:
    """A key that is equal for runs that share a compiled program. Noise and clip do not affect the program."""
    privacy = experiment.privacy and re.sub(r"(noise|clip)=[^,)]+", r"\1=1.0", experiment.privacy)
    same = {name: getattr(Experiment, name) for name in READ}
    return replace(experiment, **same, privacy=privacy).identity


def _choose(
    ready: Sequence[str], near: Sequence[str], programs: Mapping[str, str], process: RunProcess
) -> str:
    """The first run, unless a `near` one has a program that the process has loaded."""
    known = (name for name in ready if name in near and programs[name] in process.programs)
    return next(known, ready[0])


def _rounds(path: Path) -> int:
    return len(raw_lines(path / "metrics.jsonl"))


def _facts(run: Summary) -> str:
    score = "no score" if run.final is None else f"{run.metric.name} {run.metric.text(run.final)}"
    return f"{score}, {(run.bytes_up + run.bytes_down) / 1e6:.2f} MB, {run.seconds:.0f} s"
