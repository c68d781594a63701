"""CIFAR-10 and CIFAR-100 (fine labels): the publisher's binary and python versions, unpacked or as .tar.gz.

Binary: records of 1 label byte (CIFAR-100: coarse, fine) and 3,072 bytes, planes R, G, B of 32 x 32.
Python: a pickled dict with `data` uint8 [N, 3072] in the same order and `labels` or `fine_labels`.
"""

import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpara.data.readers import pickles
from fedpara.data.sources import Array, Arrays, Finding, Layout, Source, fixed_files, images, reading
from fedpara.errors import DataError

PIXELS = 3 * 32 * 32
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class Version:
    """One of the publisher's versions: its folder, its archive, and the number of records of each file."""

    folder: str
    archive: str
    train: tuple[tuple[str, int], ...]
    test: tuple[str, int]
    decode: Callable[[bytes, int, str], tuple[Array, Array]]

    @property
    def names(self) -> tuple[str, ...]:
        return (*(name for name, _ in self.train), self.test[0])


def binary(label_bytes: int) -> Callable[[bytes, int, str], tuple[Array, Array]]:
    """A decoder of `label_bytes` + 3,072 bytes per record. The last label byte is the label."""

    def decode(content: bytes, records: int, where: str) -> tuple[Array, Array]:
        table = np.frombuffer(content, np.uint8).reshape(records, label_bytes + PIXELS)
        return table[:, label_bytes:].reshape(-1, 3, 32, 32), table[:, label_bytes - 1]

    return decode


def pickled(key: str) -> Callable[[bytes, int, str], tuple[Array, Array]]:
    """A decoder of batches of the python version. `key` names the list of labels."""

    def decode(content: bytes, records: int, where: str) -> tuple[Array, Array]:
        batch = pickles.loads(content, where)
        if isinstance(batch, dict):
            batch = {
                name.decode() if isinstance(name, bytes) else name: value for name, value in batch.items()
            }
        data, labels = (batch.get("data"), batch.get(key)) if isinstance(batch, dict) else (None, None)
        if not isinstance(data, pickles.Block) or data.shape != (records, PIXELS):
            found = f"uint8 {data.shape}" if isinstance(data, pickles.Block) else type(data).__name__
            raise DataError(f"{where}: expected 'data' as uint8 ({records}, {PIXELS}), found {found}.")
        if not isinstance(labels, list) or len(labels) != records or not all(map(_is_label, labels)):
            raise DataError(f"{where}: expected {key!r} as a list of {records} integers from 0 to 255.")
        pixels = np.frombuffer(data.content, np.uint8).reshape(data.shape, order="F" if data.fortran else "C")
        return pixels.reshape(-1, 3, 32, 32), np.array(labels)

    return decode


def _is_label(value: object) -> bool:
    return type(value) is int and 0 <= value < 256


def source(
    name: str, classes: int, versions: Sequence[Version], checksums: dict[str, tuple[str, ...]]
) -> Source:
    layouts = (*map(_folder, versions), *map(_archive, versions))
    return Source(name, classes, PAGE, layouts, (50_000, 10_000), checksums)


def _folder(version: Version) -> Layout:
    def read(files: Sequence[Path]) -> Arrays:
        by_name = {path.name: path for path in files}
        return _decode(version, lambda name: by_name[name].read_bytes(), lambda name: str(by_name[name]))

    wanted = f"{version.folder}/{{{','.join(version.names)}}}"
    return Layout(version.folder, wanted, fixed_files(version.folder, version.names), read)


def _archive(version: Version) -> Layout:
    def find(root: Path) -> Finding:
        path = root / version.archive
        return Finding((path,), ()) if path.is_file() else Finding((), (version.archive,))

    def read(files: Sequence[Path]) -> Arrays:
        (path,) = files
        contents = _members(path, {f"{version.folder}/{name}" for name in version.names})
        where = f"{path}:{version.folder}"
        return _decode(
            version, lambda name: contents[f"{version.folder}/{name}"], lambda name: f"{where}/{name}"
        )

    return Layout(version.archive, version.archive, find, read)


def _members(path: Path, wanted: set[str]) -> dict[str, bytes]:
    """The wanted members of a .tar.gz, read in one pass without writing to disk."""
    contents: dict[str, bytes] = {}
    with reading(path), tarfile.open(path, "r|gz") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if name in wanted and (file := archive.extractfile(member)) is not None:
                contents[name] = file.read()
    if absent := sorted(wanted - contents.keys()):
        raise DataError(f"{path} lacks {', '.join(absent)}. Download it again from {PAGE}.")
    return contents


def _decode(version: Version, content: Callable[[str], bytes], where: Callable[[str], str]) -> Arrays:
    def part(files: Sequence[tuple[str, int]]) -> tuple[Array, Array]:
        inputs, labels = [], []
        for name, records in files:
            with reading(where(name)):
                batch = version.decode(content(name), records, where(name))
            inputs.append(batch[0])
            labels.append(batch[1])
        return np.concatenate(inputs), np.concatenate(labels)

    return images(part(version.train), part((version.test,)))


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR10_BINARY = Version(
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    tuple((f"{name}.bin", 10_000) for name in _BATCHES),
    ("test_batch.bin", 10_000),
    binary(1),
)
CIFAR10_PYTHON = Version(
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    tuple((name, 10_000) for name in _BATCHES),
    ("test_batch", 10_000),
    pickled("labels"),
)
CIFAR100_BINARY = Version(
    "cifar-100-binary", "cifar-100-binary.tar.gz", (("train.bin", 50_000),), ("test.bin", 10_000), binary(2)
)
CIFAR100_PYTHON = Version(
    "cifar-100-python",
    "cifar-100-python.tar.gz",
    (("train", 50_000),),
    ("test", 10_000),
    pickled("fine_labels"),
)
CIFAR10 = source(
    "cifar10",
    10,
    (CIFAR10_BINARY, CIFAR10_PYTHON),
    {
        "cifar-10-binary.tar.gz": ("c32a1d4ab5d03f1284b67883e8d87530",),
        "cifar-10-python.tar.gz": ("c58f30108f718f92721af3b95e74349a",),
        "data_batch_1.bin": ("5dd7e06a14cb22eb9f671a540d1b7c25",),
        "data_batch_2.bin": ("5ea93a67294ea407fff1d09f752e9692",),
        "data_batch_3.bin": ("942cd6a4bcdd0dd3c604fbe906cb4421",),
        "data_batch_4.bin": ("ae636b3ba5c66a11e91e8cb52e771fcb",),
        "data_batch_5.bin": ("53f37980c15c3d472c316c40844f3f0d",),
        "test_batch.bin": ("803d5f7f4d78ea53de84dbe85f74fb6d",),
        "data_batch_1": ("c99cafc152244af753f735de768cd75f",),
        "data_batch_2": ("d4bba439e000b95fd0a9bffe97cbabec",),
        "data_batch_3": ("54ebc095f3ab1f0389bbae665268c751",),
        "data_batch_4": ("634d18415352ddfa80567beed471001a",),
        "data_batch_5": ("482c414d41f54cd18b22e5b47cb7c3cb",),
        "test_batch": ("40351d587109b95175f43aff81a1287e",),
    },
)
CIFAR100 = source(
    "cifar100",
    100,
    (CIFAR100_BINARY, CIFAR100_PYTHON),
    {
        "cifar-100-binary.tar.gz": ("03b5dce01913d631647c71ecec9e9cb8",),
        "cifar-100-python.tar.gz": ("eb9058c3a382ffc7106e4002c42a8d85",),
        "train": ("16019d7e3df5f24257cddd939b257f8d",),
        "test": ("f0ef6b0ae62326f3e7ffdfab6717acfc",),
    },
)
