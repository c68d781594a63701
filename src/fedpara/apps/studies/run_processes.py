"""The processes of `--jobs`, as the command sees them: it hands each one a run folder after another."""

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fedpara.apps.flower.processes import Processes, tail
from fedpara.apps.flower.watchdog import PATIENCE
from fedpara.apps.studies import run_process
from fedpara.errors import RunError
from fedpara.experiments.storage.run_folder import OUTPUT

PROGRAM = run_process.__name__


class RunProcess:
    """A process that resumes run folders, one at a time (`run_process.py`)."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """What the process prints before its first run is in `log`."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self._paths, self.answers, self._log = process, process.stdin, process.stdout, log
        self.path: Path | None = None  # of its current run, or of the last one
        self.programs: set[str] = set()  # those of the runs it was given

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def give(self, path: Path, program: str) -> None:
        """Sends the process a run folder to resume. If the process has ended, `code` returns its exit code."""
        self.path = path
        self.programs.add(program)
        with suppress(OSError):
            self._paths.write(json.dumps(str(path)).encode() + b"\n")
            self._paths.flush()

    def code(self) -> int | None:
        """The exit code of the run, or of the process if that has ended. None while the run continues."""
        if select.select([self.answers], [], [], 0)[0]:
            line = self.answers.readline()
            return int(line) if line else self.process.wait()
        return self.process.poll()

    def error(self, code: int) -> RunError:
        """An error with the last line that the run printed, and the exit code if it is not 1."""
        assert self.path is not None
        files = [file for file in (self.path / OUTPUT, self._log) if file.exists()]
        printed = tail(max(files, key=lambda file: file.stat().st_mtime_ns), 4000)
        last = printed.rpartition("\n")[2].removeprefix("fedpara: ")
        return RunError(last if code == 1 else f"its process ended with code {code}: {last}")

    def leave(self) -> None:
        """Closes its input, so that the process exits."""
        with suppress(OSError):
            self._paths.close()


class RunProcesses:
    """At most `most` processes. They stay between the calls of a study, so that each imports torch only once."""

    def __init__(
        self, processes: Processes, most: int, options: list[str], environment: Mapping[str, str]
    ) -> None:
        """`options` are those of `fedpara resume`."""
        self._processes, self._most, self._environment = processes, most, environment
        self._words = [sys.executable, "-P", "-m", PROGRAM, *options]
        self._logs = processes.folder()
        self.idle: list[RunProcess] = []
        self._started = 0

    def prepare(self, runs: int, busy: int) -> None:
        """Starts as many processes as `runs` need beside `busy` ones, and replaces idle ones that have ended.

        A process that ended before its first run stays, so that its next run fails with the reason.
        """
        for ended in [one for one in self.idle if one.path is not None and not one.lives]:
            self.idle.remove(ended)
            self._processes.forget(ended.process)
        while len(self.idle) < min(runs, self._most - busy):
            log = self._logs / f"{self._started}.txt"
            self._started += 1
            self.idle.append(
                RunProcess(self._processes.start(self._words, self._environment, log, piped=True), log)
            )

    def take_back(self, process: RunProcess) -> None:
        """Makes the process idle, because its run has ended."""
        self.idle.append(process)

    def interrupt(self, others: Iterable[RunProcess]) -> None:
        """Sends Ctrl-C to the idle processes and to `others`. `Processes` kills those that do not exit."""
        every = [one.process for one in (*self.idle, *others)]
        # A command that a shell starts with `&` ignores Ctrl-C, and so do its children.
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for process in every:
            process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
        _wait(every)

    def leave(self) -> None:
        """Stops the idle processes."""
        for one in self.idle:
            one.leave()
        _wait([one.process for one in self.idle])
        for one in self.idle:
            if not one.lives:
                self._processes.forget(one.process)


def _wait(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    limit = time.monotonic() + PATIENCE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, limit - time.monotonic()))
