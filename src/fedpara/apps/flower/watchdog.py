"""A separate program that cleans up after fedpara if fedpara is killed. It waits for its stdin to close.

Its input lines: `+123 MARK` process 123 was started with MARK in its environment; `-123` that process has ended;
`/a/folder` remove this folder at the end, because it holds keys. It imports only the standard library, so it starts
fast and uses little memory.
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
"""Seconds that a program gets to exit after it was terminated, and again after it was killed."""


def watch(lines: Iterable[str]) -> None:
    """After the last line, kill every process that was started and has not ended, with its descendants."""
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
    """Kill the process, its family and `also`; wait until all have ended, since they may hold locks until then."""
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
    """The running descendants of a process, even if it has ended.

    They are found by parent, by session (a process whose parent died gets another parent), and by mark (a process in a
    new session keeps its first environment).
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
    """Each running process: its parent, and its command followed, where readable, by its environment."""
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
