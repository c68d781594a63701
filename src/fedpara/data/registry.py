"""Data sets by name: load, status, prepare, verify.

They lie in `data_dir`, else in the folder FEDPARA_DATA names, else in the user's cache folder.
"""

import contextlib
import difflib
import gzip
import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedpara.data import cache
from fedpara.data.examples import Examples
from fedpara.data.readers import digits, generated, hub
from fedpara.data.readers.cifar import CIFAR10, CIFAR100
from fedpara.data.readers.cinic import CINIC10
from fedpara.data.readers.idx import FASHION_MNIST, MNIST
from fedpara.data.readers.leaf import FEMNIST
from fedpara.data.readers.shakespeare import SHAKESPEARE
from fedpara.data.sources import Arrays, Layout, Source, locate
from fedpara.errors import ConfigError, DataError, expect_kind

SOURCES = {
    source.name: source for source in (CIFAR10, CIFAR100, CINIC10, MNIST, FASHION_MNIST, FEMNIST, SHAKESPEARE)
}
HUB = "hub:"
GENERATED = "generated:"


@dataclass(frozen=True)
class Status:
    """`examples` (train, test) is known once the set is cached; `note` says what is missing or went wrong."""

    name: str
    present: bool
    path: Path | None
    examples: tuple[int, int] | None
    cache: Path | None
    note: str


@dataclass(frozen=True)
class Report:
    """What a full read of a set found: `checked` of `files` files have the publisher's checksum."""

    name: str
    path: Path | None
    files: int
    checked: int
    examples: tuple[int, int] | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def names() -> list[str]:
    return ["digits", *SOURCES]


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """data_dir, else FEDPARA_DATA, else $XDG_CACHE_HOME/fedpara, else ~/.cache/fedpara."""
    if data_dir is not None and not isinstance(data_dir, str | os.PathLike):
        raise ConfigError(f"data_dir is {data_dir!r}: expected a folder's name.")
    chosen = data_dir or os.environ.get("FEDPARA_DATA")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "fedpara"
    except RuntimeError as error:  # no such user, or one without a home
        raise DataError(f"the data folder {chosen or '~/.cache/fedpara'} cannot be found: {error}") from None


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> tuple[Examples, Examples]:
    """(train, test) of the set; the second time from the cache beside its files."""
    expect_kind("name", name, str, ConfigError)
    if name.startswith(HUB):
        return hub.load(name.removeprefix(HUB))
    if name.startswith(GENERATED):
        return generated.load(name.removeprefix(GENERATED))
    if name == "digits":
        return digits.load()
    train, test, _ = read(_source(name), data_folder(data_dir))
    return train, test


def read(source: Source, root: Path) -> tuple[Examples, Examples, str]:
    """(train, test, note): the note says why no cache could be written, and is empty otherwise."""
    layout, files = locate(source, root)
    path = cache.location(root, source.name)
    stamp = cache.fingerprint(root, files)
    arrays = cache.read(path, stamp)
    if arrays is not None:
        try:
            return *source.build(arrays, source.classes), ""
        except (
            DataError,
            KeyError,
            RuntimeError,
        ):  # a damaged cache: it is only a copy, the source is read again
            pass
    arrays, train, test = _fresh(source, layout, files, root)
    try:
        cache.write(path, arrays, stamp, (len(train), len(test)))
    except DataError as error:  # a read-only folder: the set is whole, only the next start is slower
        return train, test, str(error)
    return train, test, ""


def status(name: str, data_dir: str | os.PathLike[str] | None = None) -> Status:
    """Whether the set is there, without reading it."""
    if name == "digits":
        return Status(name, True, digits.file(), None, None, "comes with scikit-learn")
    source, root = _source(name), data_folder(data_dir)
    try:
        layout, files = locate(source, root)
    except DataError as error:
        return Status(name, False, None, None, None, str(error))
    path = cache.location(root, name)
    counts = cache.counts(path, cache.fingerprint(root, files))
    return Status(name, True, root / layout.place, counts, None if counts is None else path, "")


def prepare(name: str, data_dir: str | os.PathLike[str] | None = None) -> Status:
    """Read the set and cache it; `note` says so where the cache could not be written."""
    if name == "digits":
        train, test = digits.load()
        return replace(status(name), examples=(len(train), len(test)))
    train, test, note = read(_source(name), data_folder(data_dir))
    return replace(status(name, data_dir), examples=(len(train), len(test)), note=note)


def verify(name: str, data_dir: str | os.PathLike[str] | None = None) -> Report:
    """Read every file of the set again and compare it with what its publisher says; never from the cache."""
    if name == "digits":
        train, test = digits.load()
        return Report(name, digits.file(), 1, 0, (len(train), len(test)), ())
    return check(_source(name), data_folder(data_dir))


def check(source: Source, root: Path) -> Report:
    try:
        layout, files = locate(source, root)
    except DataError as error:
        return Report(source.name, None, 0, 0, None, (str(error),))
    problems: list[str] = []
    known = [path for path in files if _key(path) in source.checksums]
    for path in known:
        found = _digests(path)
        if not {*found} & {*source.checksums[_key(path)]}:
            expected = " or ".join(source.checksums[_key(path)])
            problems.append(f"{path}: expected the MD5 {expected}, found {found[0]}.")
    counts: tuple[int, int] | None = None
    try:
        arrays, train, test = _fresh(source, layout, files, root)
    except DataError as error:
        problems.append(str(error))
    else:
        counts = (len(train), len(test))
        if source.counts not in (None, counts):
            problems.append(
                f"{source.name} has {counts} train and test examples: {source.counts} were published."
            )
        elif not all(counts):
            problems.append(
                f"{source.name} has {counts[0]} train and {counts[1]} test examples: some of each were expected."
            )
        cached = cache.read(cache.location(root, source.name), cache.fingerprint(root, files))
        if cached is not None and not _equal(cached, arrays):
            problems.append(f"{cache.location(root, source.name)} differs from its source: delete it.")
    return Report(source.name, root / layout.place, len(files), len(known), counts, tuple(problems))


def _source(name: str) -> Source:
    if name in SOURCES:
        return SOURCES[name]
    near = difflib.get_close_matches(name, names(), 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"no data set is called {name!r}.{hint} Known: {', '.join(names())}, and hub:owner/name@revision."
    )


def _fresh(
    source: Source, layout: Layout, files: Sequence[Path], root: Path
) -> tuple[Arrays, Examples, Examples]:
    try:
        arrays = layout.read(files)
    except OSError as error:
        raise DataError(f"{source.name} in {root / layout.place} could not be read: {error}") from error
    try:
        return arrays, *source.build(arrays, source.classes)
    except DataError as error:
        raise DataError(f"{source.name} in {root / layout.place} is damaged: {error}") from None


def _key(path: Path) -> str:
    return path.name if path.name.endswith(".tar.gz") else path.name.removesuffix(".gz")


def _digests(path: Path) -> list[str]:
    """The MD5 of the file and, for a packed one, of what is in it."""
    contents = [path.read_bytes()]
    if path.suffix == ".gz" and _key(path) != path.name:
        with contextlib.suppress(OSError, EOFError, zlib.error):  # damage is reported by the read
            contents.append(gzip.decompress(contents[0]))
    return [hashlib.md5(content, usedforsecurity=False).hexdigest() for content in contents]


def _equal(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
