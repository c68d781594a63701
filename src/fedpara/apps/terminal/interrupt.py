"""Ctrl-C while a command is still importing torch, which takes seconds."""

from collections.abc import Iterator
from contextlib import contextmanager


class NotStarted(Exception):
    """Ctrl-C arrived before the command started its work."""


@contextmanager
def starting() -> Iterator[None]:
    """Turn Ctrl-C inside the block, where a command imports its work, into NotStarted."""
    try:
        yield
    except KeyboardInterrupt:
        raise NotStarted from None
