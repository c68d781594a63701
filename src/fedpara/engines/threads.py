"""map_in_threads: applies a function to all items in parallel threads.

Useful for files and digests, which release Python's global lock.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = min(16, os.cpu_count() or 1)


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in the items' order. The first error is raised once all started calls have ended."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, items))
