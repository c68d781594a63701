"""MNIST and Fashion-MNIST as idx or idx.gz files.

idx: two zero bytes, the type (8 = uint8), the number of dimensions, each dimension as a big-endian uint32,
then the bytes. Images are 0x00000803 [N, rows, columns], labels 0x00000801 [N].
"""

import gzip
import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedpara.data.sources import Array, Arrays, Layout, Source, fixed_files, images
from fedpara.errors import DataError

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(path: Path, dimensions: int) -> Array:
    """The uint8 array of `dimensions` dimensions in an idx file, packed with gzip or not."""
    content = _content(path)
    magic = bytes((0, 0, 8, dimensions))
    header = 4 + 4 * dimensions
    if content[:4] != magic:
        raise DataError(
            f"{path} is no idx file of {dimensions} dimensions: expected the magic 0x{magic.hex()}, "
            f"found 0x{content[:4].hex()}."
        )
    shape = tuple(int(size) for size in np.frombuffer(content[4:header].ljust(4 * dimensions, b"\0"), ">u4"))
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DataError(
            f"{path} is damaged: its header announces {' x '.join(map(str, shape))} = {expected:,} bytes, "
            f"found {len(content):,}. Take it from its publisher again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def source(name: str, page: str, places: Sequence[str], checksums: dict[str, tuple[str, ...]]) -> Source:
    """The four files in any of `places`, folders below the data folder ('.' is the data folder itself)."""

    def layout(place: str) -> Layout:
        wanted = f"{place}/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte[.gz]".removeprefix("./")
        return Layout(place, wanted, fixed_files(place, NAMES, ("", ".gz")), lambda files: _read(name, files))

    return Source(name, 10, page, tuple(map(layout, places)), (60_000, 10_000), checksums)


def _read(name: str, files: Sequence[Path]) -> Arrays:
    _refuse_the_other(name, files[1])

    def part(image_file: Path, label_file: Path) -> tuple[Array, Array]:
        inputs, labels = read_idx(image_file, 3), read_idx(label_file, 1)
        if len(inputs) != len(labels):
            raise DataError(
                f"{image_file} has {len(inputs):,} images: expected as many as the {len(labels):,} labels "
                f"of {label_file}."
            )
        return inputs[:, None], labels

    return images(part(files[0], files[1]), part(files[2], files[3]))


def _refuse_the_other(name: str, labels: Path) -> None:
    """MNIST and Fashion-MNIST have the same file names: one is easily taken for the other."""
    digest = hashlib.md5(_content(labels), usedforsecurity=False).hexdigest()
    for other in (MNIST, FASHION_MNIST):
        if other.name != name and digest in other.checksums[NAMES[1]]:
            raise DataError(
                f"{labels} belongs to {other.name}: {name} was asked for. Keep them in folders of their own."
            )


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged: {path.stat().st_size:,} bytes that are not a whole gzip file ({error}). "
            "Take it from its publisher again."
        ) from None


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
