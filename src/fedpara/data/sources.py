"""Source: a published data set. It describes the files, how to read them and who publishes them.

A layout turns files into Arrays, the compact tensors that the cache stores; `build` turns Arrays into (train, test).
For images the arrays are `train.inputs`, `train.labels`, `test.inputs`, `test.labels`, `mean`, `std` and, for sets with
owners, `train.owners` and `test.owners`.
"""

import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpara.data.examples import Examples
from fedpara.errors import DataError, in_a_line

Arrays = dict[str, Tensor]
Array = NDArray[np.generic]

_DAMAGE = (
    *(OSError, EOFError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, SyntaxError),
    *(zlib.error, tarfile.TarError),
)
"""What parsers raise for damaged files: Pillow even raises SyntaxError."""


@dataclass(frozen=True)
class Finding:
    """The files of a layout that exist (to read, and to watch for changes), and the names that are missing."""

    files: tuple[Path, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """One form of a set: `place` is a folder or archive in the data folder, `wanted` describes its files."""

    place: str
    wanted: str
    find: Callable[[Path], Finding]
    read: Callable[[Sequence[Path]], Arrays]


def build_images(arrays: Arrays, classes: int) -> tuple[Examples, Examples]:
    mean, std = tuple(arrays["mean"].tolist()), tuple(arrays["std"].tolist())

    def part(name: str) -> Examples:
        owners = arrays.get(f"{name}.owners")
        return Examples(arrays[f"{name}.inputs"], arrays[f"{name}.labels"], classes, owners, mean, std)

    return part("train"), part("test")


@dataclass(frozen=True)
class Source:
    """`counts` is the published (train, test); `checksums` are the MD5s that a file may have, packed or plain."""

    name: str
    classes: int
    page: str
    layouts: tuple[Layout, ...]
    counts: tuple[int, int] | None = None
    checksums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    build: Callable[[Arrays, int], tuple[Examples, Examples]] = build_images


def fixed_files(
    place: str, names: Sequence[str], suffixes: Sequence[str] = ("",)
) -> Callable[[Path], Finding]:
    """Find `place/name` for every name, with the first suffix that exists."""

    def find(root: Path) -> Finding:
        files: list[Path] = []
        missing: list[str] = []
        for name in names:
            there = [path for suffix in suffixes if (path := root / place / (name + suffix)).is_file()]
            files += there[:1]
            missing += [] if there else [name]
        return Finding(tuple(files), tuple(missing))

    return find


@contextmanager
def reading(file: object) -> Iterator[None]:
    """Parse a file in this block: the DataError of a failure names the file."""
    try:
        yield
    except _DAMAGE as error:
        raise DataError(
            f"{file} could not be read ({in_a_line(error)}): check it, or download it again."
        ) from None


def locate(source: Source, root: Path) -> tuple[Layout, tuple[Path, ...]]:
    """The first complete layout of `source` under `root`, and its files."""
    partial: list[str] = []
    for layout in source.layouts:
        finding = layout.find(root)
        if not finding.missing:
            return layout, finding.files
        if finding.files:
            partial.append(f"{root / layout.place} lacks {_listed(finding.missing)}")
    looked = "; or ".join(layout.wanted for layout in source.layouts)
    found = (
        f"{source.name} is incomplete: {'; '.join(partial)}" if partial else f"{source.name} is not in {root}"
    )
    raise DataError(
        f"{found}. Looked for {looked}. Download it from {source.page} and put it into {root}, "
        "or set --data-dir or FEDPARA_DATA to the folder that has it."
    )


def images(
    train: tuple[Array, Array], test: tuple[Array, Array], owners: tuple[Array, Array] | None = None
) -> Arrays:
    """Arrays of an image set: uint8 [N, C, H, W] with labels, and the training mean and std per channel."""
    arrays: Arrays = {}
    for name, (inputs, labels) in (("train", train), ("test", test)):
        arrays[f"{name}.inputs"] = torch.from_numpy(np.require(inputs, np.uint8, ["C", "W"]))
        arrays[f"{name}.labels"] = torch.from_numpy(labels.astype(np.int64))
    if owners is not None:
        arrays["train.owners"], arrays["test.owners"] = (torch.from_numpy(o.astype(np.int64)) for o in owners)
    return arrays | channel_statistics(arrays["train.inputs"])


def channel_statistics(inputs: Tensor) -> Arrays:
    """Mean and std of x / 255 per channel, from the counts of the 256 values: exact, without a float copy."""
    value = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(inputs.shape[1]):
        share = torch.bincount(inputs[:, channel].reshape(-1), minlength=256).double()
        share /= share.sum().clamp(min=1)
        mean = (share * value).sum()
        std = (share * (value - mean).square()).sum().sqrt()
        means.append(mean)
        stds.append(std if std > 0 else torch.ones_like(std))  # a constant channel needs no scale
    return {"mean": torch.stack(means), "std": torch.stack(stds)}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
