"""map_in_threads and checked_in_order: apply a function to items in parallel threads.

Useful for files and digests, which release Python's global lock.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = min(16, os.cpu_count() or 1)


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in the items' order. The first error is raised once all started calls have ended."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, items))


def checked_in_order(
    items: Iterable[Item], check: Callable[[Item], Result], is_large: Callable[[Item], bool]
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in order. Threads check large items while the next ones arrive."""
    with ThreadPoolExecutor(THREADS) as pool:
        pending: deque[tuple[Item, Future[Result]]] = deque()
        for item in items:
            if not is_large(item):
                yield from ((one, result.result()) for one, result in pending)
                pending.clear()
                yield item, check(item)
                continue
            pending.append((item, pool.submit(check, item)))
            if len(pending) > THREADS:
                one, result = pending.popleft()
                yield one, result.result()
        yield from ((one, result.result()) for one, result in pending)
