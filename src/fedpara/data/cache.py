"""The compact cache beside the source: one safetensors file a set, mapped into memory when it is loaded.

Its metadata holds the format's version and the name, size and time of every source file, so that a changed
source is read again. It is written beside its final name and moved there whole: a kill leaves no half cache.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fedpara.data.sources import Arrays
from fedpara.errors import DataError, FedParaError
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
    """(train, test) examples in the cache, or None where there is no cache of these sources."""
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
    """The cached arrays, or None where there is no cache of these sources: absent, damaged or out of date."""
    if counts(path, sources) is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no dict)
    except (OSError, SafetensorError):
        return None


def write(path: Path, arrays: Arrays, sources: str, examples: tuple[int, int]) -> None:
    metadata = {"version": VERSION, "sources": sources, "examples": f"{examples[0]} {examples[1]}"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, older_than=STALE_SECONDS)
        write_tensors(path, arrays, metadata)
    except (OSError, FedParaError) as error:
        raise DataError(
            f"the cache {path} could not be written ({error}); every load reads the source again."
        ) from None
