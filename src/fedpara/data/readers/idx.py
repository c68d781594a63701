"""MNIST and Fashion-MNIST as idx or idx.gz files.

idx: two zero bytes, the type (8 = uint8), the number of dimensions, each dimension as a big-endian uint32,
then the data. Images are 0x00000803 [N, rows, columns], labels 0x00000801 [N].
"""

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedpara.data.sources import Array, Arrays, Layout, Source, fixed_files, images, reading
from fedpara.errors import DataError

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(path: Path, dimensions: int) -> Array:
    """The uint8 array in an idx file, which may be packed with gzip."""
    with reading(path):
        content = _content(path)
        magic, header = bytes((0, 0, 8, dimensions)), 4 + 4 * dimensions
        if content[:4] != magic:
            raise ValueError(f"it starts with 0x{content[:4].hex()}: expected 0x{magic.hex()}")
        shape = [int(size) for size in np.frombuffer(content[4:header], ">u4")]
        return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def source(name: str, page: str, places: Sequence[str], checksums: dict[str, tuple[str, ...]]) -> Source:
    """A source whose four files are in one of `places`: folders inside the data folder, or '.' for itself."""

    def layout(place: str) -> Layout:
        wanted = f"{place}/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte[.gz]".removeprefix("./")
        return Layout(place, wanted, fixed_files(place, NAMES, ("", ".gz")), lambda files: _read(name, files))

    return Source(name, 10, page, tuple(map(layout, places)), (60_000, 10_000), checksums)


def _read(name: str, files: Sequence[Path]) -> Arrays:
    # MNIST and Fashion-MNIST have the same file names: one is easily taken for the other.
    with reading(files[1]):
        digest = hashlib.md5(_content(files[1]), usedforsecurity=False).hexdigest()
    for other in (MNIST, FASHION_MNIST):
        if other.name != name and digest in other.checksums[NAMES[1]]:
            raise DataError(f"{files[1]} is {other.name}, not {name}. Keep each set in its own folder.")
    train, test = ((read_idx(files[i], 3)[:, None], read_idx(files[i + 1], 1)) for i in (0, 2))
    return images(train, test)


def _content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


MNIST = source(
    "mnist",
    "https://yann.lecun.com/exdb/mnist (files at https://ossci-datasets.s3.amazonaws.com/mnist)",
    ("MNIST/raw", "MNIST", "mnist", "."),
    {
        NAMES[0]: ("6bbc9ace898e44ae57da46a324031adb", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        NAMES[1]: ("a25bea736e30d166cdddb491f175f624", "d53e105ee54ea40749a09fcbcd1e9432"),
        NAMES[2]: ("2646ac647ad5339dbf082846283269ea", "9fb629c4189551a2d022fa330f9573f3"),
        NAMES[3]: ("27ae3e4e09519cfbb04c329615203637", "ec29112dd5afa0611ce80d1b7f02629c"),
    },
)
FASHION_MNIST = source(
    "fashion-mnist",
    "https://github.com/zalandoresearch/fashion-mnist",
    ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "."),
    {
        NAMES[0]: ("f4a8712d7a061bf5bd6d2ca38dc4d50a", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        NAMES[1]: ("9018921c3c673c538a1fc5bad174d6f9", "25c81989df183df01b3e8a0aad5dffbe"),
        NAMES[2]: ("8181f5470baa50b63fa0f6fddb340f0a", "bef4ecab320f06d8554ea6380940ec79"),
        NAMES[3]: ("15d484375f8d13e6eb1aabb0c3f46965", "bb300cfdad3c16e7a12a480ee83cd310"),
    },
)
