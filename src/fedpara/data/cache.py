"""The cache of a data set: one safetensors file in the data folder, mapped into memory when it is loaded.

Its metadata holds the version of the format and the name, size and time of every source file: if a source file changes,
the set is read again. The cache is written atomically.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fedpara.data.sources import Arrays
from fedpara.files import sweep, write_tensors

VERSION = "1"
FOLDER = "fedpara-cache"
STALE_SECONDS = 3600.0


def location(root: Path, name: str) -> Path:
    return root / FOLDER / f"{name}.safetensors"


def fingerprint(root: Path, files: Sequence[Path]) -> str:
    """[[path, size, time], ...] of the source files, as JSON."""
    listing = []
    for path in files:
        stat = path.stat()
        listing.append([path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns])
    return json.dumps(listing)


def counts(path: Path, sources: str) -> tuple[int, int] | None:
    """The numbers of (train, test) examples in the cache, or None if there is no cache of these sources."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    if metadata.get("version") != VERSION or metadata.get("sources") != sources:
        return None
    try:
        train, test = metadata["examples"].split()
        return int(train), int(test)
    except (KeyError, ValueError):
        return None


def read(path: Path, sources: str) -> Arrays | None:
    """The cached arrays, or None if the cache is missing, damaged or out of date."""
    if counts(path, sources) is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError):
        return None


def write(path: Path, arrays: Arrays, sources: str, examples: tuple[int, int]) -> None:
    metadata = {"version": VERSION, "sources": sources, "examples": f"{examples[0]} {examples[1]}"}
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, older_than=STALE_SECONDS)
    write_tensors(path, arrays, metadata)
