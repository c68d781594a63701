"""at_once: one piece of work for each item, by as many threads as there are cores.

It pays for files and digests, during which Python lets other threads run.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = min(16, os.cpu_count() or 1)


def at_once(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in the items' order; the first error is raised once what began has ended."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, items))
