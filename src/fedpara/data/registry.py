"""Data sets by name: load, status, prepare, verify.

The data folder is `data_dir`, else FEDPARA_DATA, else the user's cache folder.
"""

import contextlib
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
from fedpara.data.readers.shakespeare import SHAKESPEARE, SHAKESPEARE_100, SHAKESPEARE_100_MIXED
from fedpara.data.sources import Arrays, Layout, Source, locate
from fedpara.errors import ConfigError, DataError, FedParaError, among

_TEXTS = (SHAKESPEARE, SHAKESPEARE_100, SHAKESPEARE_100_MIXED)
SOURCES = {
    source.name: source for source in (CIFAR10, CIFAR100, CINIC10, MNIST, FASHION_MNIST, FEMNIST, *_TEXTS)
}
HUB = "hub:"
GENERATED = "generated:"


@dataclass(frozen=True)
class Status:
    """`examples` (train, test) is known if the set is cached; `note` says what is missing or went wrong."""

    name: str
    present: bool
    path: Path | None
    examples: tuple[int, int] | None
    cache: Path | None
    note: str


@dataclass(frozen=True)
class Report:
    """The result of reading a set in full. `checked` of `files` files were compared with the publisher's checksums."""

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
    chosen = data_dir or os.environ.get("FEDPARA_DATA")
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(chosen or os.path.join(cache_home, "fedpara")))


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> tuple[Examples, Examples]:
    """(train, test) of a set. The first load writes a cache that later loads read."""
    if name.startswith(HUB):
        return hub.load(name.removeprefix(HUB))
    if name.startswith(GENERATED):
        return generated.load(name.removeprefix(GENERATED))
    if name == "digits":
        return digits.load()
    train, test, _ = read(_source(name), data_folder(data_dir))
    return train, test


def read(source: Source, root: Path) -> tuple[Examples, Examples, str]:
    """(train, test, note); the note is empty unless the cache could not be written."""
    layout, files = locate(source, root)
    path = cache.location(root, source.name)
    stamp = cache.fingerprint(root, files)
    arrays = cache.read(path, stamp)
    if arrays is not None:
        with contextlib.suppress(DataError, KeyError, RuntimeError):  # damaged: read the source again
            return *source.build(arrays, source.classes), ""
    arrays, train, test = _fresh(source, layout, files, root)
    try:
        cache.write(path, arrays, stamp, (len(train), len(test)))
    except (OSError, FedParaError) as error:  # such as a read-only folder
        return (
            train,
            test,
            f"the cache {path} could not be written ({error}); every load reads the source files.",
        )
    return train, test, ""


def status(name: str, data_dir: str | os.PathLike[str] | None = None) -> Status:
    """Whether the set is in the data folder, without reading it."""
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
    """Read the set and cache it. `note` says why if the cache could not be written."""
    if name == "digits":
        train, test = digits.load()
        return replace(status(name), examples=(len(train), len(test)))
    train, test, note = read(_source(name), data_folder(data_dir))
    return replace(status(name, data_dir), examples=(len(train), len(test)), note=note)


def verify(name: str, data_dir: str | os.PathLike[str] | None = None) -> Report:
    """Read every source file of the set and compare it with the published checksums and counts."""
    if name == "digits":
        train, test = digits.load()
        return Report(name, digits.file(), 1, 0, (len(train), len(test)), ())
    return _verified(_source(name), data_folder(data_dir))


def _verified(source: Source, root: Path) -> Report:
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
                f"{source.name} has {counts[0]} train and {counts[1]} test examples: expected some of each."
            )
        cached = cache.read(cache.location(root, source.name), cache.fingerprint(root, files))
        if cached is not None and not _equal(cached, arrays):
            problems.append(f"{cache.location(root, source.name)} differs from its source: delete it.")
    return Report(source.name, root / layout.place, len(files), len(known), counts, tuple(problems))


def _source(name: str) -> Source:
    if name in SOURCES:
        return SOURCES[name]
    hint = among(name, [*names(), "hub:owner/name@revision"])
    own = "Your own is package.module:function."
    raise ConfigError(f"no data set is called {name!r}. {hint[0].upper()}{hint[1:]} {own}")


def _fresh(
    source: Source, layout: Layout, files: Sequence[Path], root: Path
) -> tuple[Arrays, Examples, Examples]:
    arrays = layout.read(files)
    try:
        return arrays, *source.build(arrays, source.classes)
    except DataError as error:
        raise DataError(f"{source.name} in {root / layout.place} is damaged: {error}") from None


def _key(path: Path) -> str:
    return path.name if path.name.endswith(".tar.gz") else path.name.removesuffix(".gz")


def _digests(path: Path) -> list[str]:
    """The MD5 of the file and, if it is packed, of its content."""
    contents = [path.read_bytes()]
    if path.suffix == ".gz" and _key(path) != path.name:
        with contextlib.suppress(OSError, EOFError, zlib.error):  # damage is reported by the read
            contents.append(gzip.decompress(contents[0]))
    return [hashlib.md5(content, usedforsecurity=False).hexdigest() for content in contents]


def _equal(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
