"""Ctrl-C while a command is still importing torch, which takes seconds."""

from collections.abc import Iterator
from contextlib import contextmanager


class NotBegun(Exception):
    """Ctrl-C arrived before the command did anything."""


@contextmanager
def starting() -> Iterator[None]:
    """Wraps the imports of a command's work."""
    try:
        yield
    except KeyboardInterrupt:
        raise NotBegun from None
