"""Flower's programs as child processes, each with its own home and log, stopped by pid."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from fedpara.apps.flower import watchdog as flower_watchdog
from fedpara.apps.flower.watchdog import MARKED, PATIENCE, end, family, kill
from fedpara.errors import MissingExtraError, RunError, install

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Otherwise Flower runs `uv sync` for every run, which needs a network and may download another torch.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Flower relies on this for clients without a GPU, and Ray warns about its future default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def require() -> None:
    """MissingExtraError unless Flower and its simulator are installed."""
    for package in ("flwr", "ray"):
        if find_spec(package) is None:
            raise MissingExtraError(f"engine 'flower' needs the package {package}: {install('flower')}")


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of Flower's programs. They find each other on PATH, first next to this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(home), **(extra or {})}


def program(name: str) -> str:
    """The path of Flower's program of this name, next to this Python."""
    return str(Path(sys.executable).parent / name)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Processes:
    """Child processes and their descendants, which all stop at the end of the block.

    The server stops first: if its nodes stopped earlier, it would record a round without replies. If this program is
    killed, a watchdog stops the processes and removes the folders.
    """

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[bytes]] = []
        self._marks: dict[int, str] = {}
        self._folders: list[Path] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Processes":
        """Start the watchdog, and treat SIGTERM and SIGHUP like Ctrl-C."""
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", flower_watchdog.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
                    self._before[number] = signal.signal(number, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for process in self.running.copy():
                kill(self._family(process))
                self.stop(process)
        finally:  # also after a second Ctrl-C: the watchdog kills the remaining processes
            self._watchdog.communicate()
            for folder in self._folders:  # in case the watchdog was killed
                shutil.rmtree(folder, ignore_errors=True)
            for number, before in self._before.items():
                signal.signal(number, before)

    def folder(self, within: str | None = None) -> Path:
        """A temporary folder, removed after the processes have ended, even if this program is killed."""
        path = Path(tempfile.mkdtemp(prefix="fedpara-", dir=within)).absolute()
        self._folders.append(path)
        self._notify_watchdog(str(path))
        return path

    def start(
        self, arguments: list[str], env: Mapping[str, str], log: Path, piped: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a program in a new session: Ctrl-C reaches only this program, which stops the others in order.

        With `piped`, its stdin and stdout are pipes to this program. Otherwise stdin is empty and stdout goes to `log`.
        """
        mark = secrets.token_hex(16)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [program(arguments[0]), *arguments[1:]],
                env={MARKED: mark, **{name: value for name, value in env.items() if name != MARKED}},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                start_new_session=True,
            )
        self.running.append(process)
        self._marks[process.pid] = mark
        self._notify_watchdog(f"+{process.pid} {mark}")
        return process

    def stop(self, process: subprocess.Popen[bytes], patience: float = PATIENCE) -> None:
        """Terminate the process, then kill it and its descendants if they are still running."""
        before = self._family(process)
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        self._end(process, before)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the process and its descendants at once, as in a crash."""
        self._end(process, set())

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Remove a process that has ended."""
        if process in self.running:
            self.running.remove(process)
            self._notify_watchdog(f"-{process.pid}")
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(OSError):
                    pipe.close()

    def _family(self, process: subprocess.Popen[bytes]) -> set[int]:
        return family(process.pid, self._marks.get(process.pid, ""))

    def _end(self, process: subprocess.Popen[bytes], before: set[int]) -> None:
        end(process.pid, self._marks.get(process.pid, ""), before)
        process.wait()
        self.forget(process)

    def _notify_watchdog(self, line: str) -> None:
        assert self._watchdog.stdin is not None
        with suppress(OSError):
            self._watchdog.stdin.write(os.fsencode(f"{line}\n"))
            self._watchdog.stdin.flush()


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 60.0) -> None:
    """Return once the SuperLink listens on `port`. RunError if it exits or takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    code = process.poll()
    cause = f"within {seconds:g} s" if code is None else f"and exited with code {code}"
    raise RunError(f"the SuperLink did not listen on port {port} {cause}: {tail(log)}")


def tail(log: Path, characters: int = 600) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-characters:].strip() if log.exists() else "it wrote no log"
