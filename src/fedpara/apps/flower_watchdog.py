"""Ends what a killed program started: it runs beside it, as a program of its own, and waits for the pipe to close.

A line `+123` says that process 123 was started, `-123` that it is gone. It uses Python's own modules only, so it is up
at once, and small.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress


def watch(lines: Iterable[str]) -> None:
    """Kills at the end of the lines whatever was started and is not said to be gone, with all that it started."""
    left: set[int] = set()
    for line in lines:
        if line.startswith("+"):
            left.add(int(line))
        else:
            left.discard(-int(line))
    for pid in left:
        kill([pid, *descendants(pid)])


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    children: dict[int, list[int]] = {}
    for line in listed.stdout.splitlines():
        child, parent = (int(word) for word in line.split())
        children.setdefault(parent, []).append(child)
    found, next_ = [], [pid]
    while next_:
        next_ = [child for parent in next_ for child in children.get(parent, [])]
        found += next_
    return found


if __name__ == "__main__":
    watch(sys.stdin)
