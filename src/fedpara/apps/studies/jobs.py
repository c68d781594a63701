"""`--jobs` and `--minutes`: the runs of a study in processes side by side.

Each process is `fedpara resume` of a run folder that the study has laid out. It writes what it prints to output.txt in
that folder. Runs that differ only in numbers that a program reads, such as the seed and the learning rate, share a
compiled program, which is cached on disk: one of them starts first, and the others wait until it has finished a round.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedpara.apps.flower.processes import Processes, tail
from fedpara.apps.flower.watchdog import PATIENCE
from fedpara.apps.terminal.progress import say
from fedpara.engines.distributed.process_group import join
from fedpara.errors import FedParaError, RunError, UsageError
from fedpara.experiments import Summary, read_run
from fedpara.experiments.storage.jsonl import raw_lines
from fedpara.experiments.storage.run_folder import OUTPUT
from fedpara.experiments.storage.summary import read_config
from fedpara.experiments.studies.tune import Play, Played

POLL = 0.1
"""Seconds between two looks at the processes."""
THREADS = "OMP_NUM_THREADS"
READ: dict[str, Any] = {"seed": 0, "lr": 1.0, "lr_decay": 1.0, "init": None}
"""Fields that a compiled program does not depend on."""


def player(
    jobs: int, minutes: float | None, data_dir: Path | None, track: str = "none", *, engines: set[str]
) -> Play | None:
    """Plays runs in at most `jobs` processes, until `minutes` have passed since this call. None: in this process.

    `engines` are those of the runs. Each process gets its share of the threads unless OMP_NUM_THREADS is set.
    """
    if jobs == 1 and minutes is None:
        return None
    if join().size > 1:
        raise UsageError("--jobs and --minutes start their own processes: use them without torchrun.")
    if "flower" in engines:
        raise UsageError("--engine flower starts its own processes: use it without --jobs and --minutes.")
    if THREADS not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))  # new run folders record this number
    environment = {THREADS: str(torch.get_num_threads()), **os.environ}
    options = ["--track", track, "--json", *(["--data-dir", str(data_dir)] if data_dir else [])]
    end = None if minutes is None else time.monotonic() + 60 * minutes
    return lambda paths: _play(paths, jobs, end, options, environment)


@dataclass(frozen=True)
class Child:
    """A process that resumes a run, which had finished `rounds` rounds before."""

    path: Path
    program: str
    rounds: int
    process: subprocess.Popen[bytes]

    @property
    def trains(self) -> bool:
        """Whether it has finished a round."""
        return _rounds(self.path) > self.rounds


def _play(
    paths: Mapping[str, Path], jobs: int, end: float | None, options: list[str], environment: dict[str, str]
) -> Played:
    """The finished runs and the errors of the failed ones. KeyboardInterrupt if runs are left at the end."""
    programs = {name: replace(read_config(path), **READ).identity for name, path in paths.items()}
    waiting, running, compiled = list(paths), dict[str, Child](), set[str]()
    done: dict[str, Summary] = {}
    failed: dict[str, FedParaError] = {}
    with Processes() as processes:
        try:
            while waiting or running:
                if end is not None and time.monotonic() >= end:
                    say(f"the minutes are over: {len(waiting) + len(running)} of {len(paths)} runs are left.")
                    raise KeyboardInterrupt
                compiled |= {child.program for child in running.values() if child.trains}
                starting = {child.program for child in running.values()} - compiled
                ready = [name for name in waiting if programs[name] not in starting]
                if ready and len(running) < jobs:
                    name, path = ready[0], paths[ready[0]]
                    words = [sys.executable, "-P", "-m", "fedpara", "resume", str(path), *options]
                    before = _rounds(path)
                    process = processes.start(words, environment, path / OUTPUT)
                    running[name] = Child(path, programs[name], before, process)
                    waiting.remove(name)
                    continue
                time.sleep(POLL)
                for name in [name for name, child in running.items() if child.process.poll() is not None]:
                    child = running.pop(name)
                    processes.forget(child.process)
                    if child.process.returncode:
                        failed[name] = _error(child)
                        told = f"failed: {failed[name]}"
                    else:
                        done[name] = read_run(child.path)
                        told = _facts(done[name])
                    say(f"{len(done) + len(failed)}/{len(paths)} {name}: {told}")
        except KeyboardInterrupt:
            _interrupt([child.process for child in running.values()])
            raise
    return done, failed


def _interrupt(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ctrl-C for each process. Those that do not end are killed with the block of `Processes`."""
    # A shell that starts a command with `&` lets it and its children ignore Ctrl-C.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    for process in processes:
        process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
    limit = time.monotonic() + PATIENCE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, limit - time.monotonic()))


def _rounds(path: Path) -> int:
    return len(raw_lines(path / "metrics.jsonl"))


def _error(child: Child) -> RunError:
    """The last line that the process printed, and its exit code if it says more than 1, for failure."""
    last = tail(child.path / OUTPUT, 4000).rpartition("\n")[2].removeprefix("fedpara: ")
    code = child.process.returncode
    return RunError(last if code == 1 else f"its process ended with code {code}: {last}")


def _facts(run: Summary) -> str:
    score = "no score" if run.final is None else f"{run.metric.name} {run.metric.text(run.final)}"
    return f"{score}, {(run.bytes_up + run.bytes_down) / 1e6:.2f} MB, {run.seconds:.0f} s"
