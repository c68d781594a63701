"""Ends what a killed program started: it runs beside it, as a program of its own, and waits for the pipe to close.

A line `+123 MARK` says that process 123 was started with MARK in its environment, `-123` that it is gone, `/a/folder`
that the folder is to be removed when all is over: it holds keys. It uses Python's own modules only, so it is up at
once, and small.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

MARKED = "FEDPARA_STARTED"
PATIENCE = 10.0
"""Seconds a program has to end: by itself when it is asked to, or after it was killed."""


def watch(lines: Iterable[str]) -> None:
    """At the end of the lines: kills whatever was started and is not said to be gone, with all that it started."""
    left: dict[int, str] = {}
    folders = []
    for line in map(str.rstrip, lines):
        if line.startswith("/"):
            folders.append(line)
        elif line.startswith("+"):
            number, _, mark = line.partition(" ")
            left[int(number)] = mark
        else:
            left.pop(-int(line), None)
    for pid, mark in left.items():
        end(pid, mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def end(pid: int, mark: str, also: Iterable[int] = ()) -> None:
    """Kills it, its family and `also`, and waits until none runs: what is killed may hold a lock for a moment."""
    named, limit = {pid, *also}, time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        running = _running()
        named |= _family(running, pid, mark)
        left = named & running.keys()
        if not left:
            return
        kill(left)
        time.sleep(0.01)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def family(pid: int, mark: str = "") -> set[int]:
    """What the process started, directly or not, and still runs; also after its own end.

    By parent; by session, for a process whose parent has died has another parent; by mark, for a process with a session
    of its own still has the environment it was born with.
    """
    return _family(_running(), pid, mark)


def _family(running: dict[int, tuple[int, str]], pid: int, mark: str) -> set[int]:
    marked = f"{MARKED}={mark}"
    own = {i for i, (_, words) in running.items() if (mark and marked in words) or _session(i) == pid}
    return (own | _below(running, {pid} | own)) - {pid}


def _below(running: dict[int, tuple[int, str]], pids: set[int]) -> set[int]:
    found: set[int] = set()
    next_ = pids
    while next_:
        next_ = {child for child, (parent, _) in running.items() if parent in next_} - found
        found |= next_
    return found


def _running() -> dict[int, tuple[int, str]]:
    """Of each process that has not ended: its parent, its command and, where it is ours to see, its environment."""
    command = ["ps", "axeww", "-o", "pid=,ppid=,stat=,command="]
    listed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    rows = (re.match(r" *(\d+) +(\d+) +([^Z\s]\S*) +(.*)", line) for line in listed.stdout.splitlines())
    return {int(row[1]): (int(row[2]), row[4]) for row in rows if row}


def _session(pid: int) -> int:
    with suppress(OSError):
        return os.getsid(pid)
    return 0


if __name__ == "__main__":
    watch(map(os.fsdecode, sys.stdin.buffer))
