"""Threads: apply a function to items in parallel, or give a thread its own GPU stream.

Threads are useful for files and digests, which release Python's global lock.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = min(16, os.cpu_count() or 1)
STREAMS = 4
"""Threads that use a GPU beside the training. Each holds several copies of the model in the GPU's memory."""


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


def ready_on(device: torch.device) -> torch.cuda.Event | None:
    """An event at the current end of a GPU's common stream; None on other devices."""
    there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.current_stream(device).record_event() if there else None


@contextmanager
def own_stream(device: torch.device, ready: torch.cuda.Event | None) -> Iterator[None]:
    """Runs this thread's GPU work on a separate stream, which starts after `ready`.

    On the common stream, a thread that reads a number would wait until all clients are trained.
    """
    if ready is None:
        yield
        return
    streams = _streams(device)
    stream = streams.get()
    try:
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            yield
            stream.synchronize()
    finally:
        streams.put(stream)


@cache
def _streams(device: torch.device) -> "SimpleQueue[torch.cuda.Stream]":
    """A pool of streams to reuse, because torch keeps freed memory per stream. They have priority over the training."""
    streams: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
    for _ in range(STREAMS):
        streams.put(torch.cuda.Stream(device, priority=-1))
    return streams
