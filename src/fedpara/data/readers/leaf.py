"""LEAF's FEMNIST json: {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}.

x are rows of 784 pixels from 0 (ink) to 1 (paper), y are classes below 62. Writers are numbered in the order of the
training files; writers that only have test data come after them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpara.data.sources import Array, Arrays, Finding, Layout, Source, fixed_files, images, reading


class _Floats(dict[str, float]):
    """Converts each literal once: all pixels together have only a few hundred different values."""

    def __missing__(self, literal: str) -> float:
        self[literal] = value = float(literal)
        return value


def read_leaf(train: Sequence[Path], test: Sequence[Path]) -> Arrays:
    writers: dict[str, int] = {}
    train_part, test_part = _part(train, writers), _part(test, writers)
    return images(train_part[:2], test_part[:2], (train_part[2], test_part[2]))


def _part(files: Sequence[Path], writers: dict[str, int]) -> tuple[Array, Array, Array]:
    inputs: list[Array] = [np.empty((0, 784), np.uint8)]
    labels: list[Array] = [np.empty(0, np.int64)]
    owners: list[Array] = [np.empty(0, np.int64)]
    for path in files:
        for user, x, y in _users(path):
            inputs.append(x)
            labels.append(y)
            owners.append(np.full(len(y), writers.setdefault(user, len(writers))))
    return np.concatenate(inputs).reshape(-1, 1, 28, 28), np.concatenate(labels), np.concatenate(owners)


def _users(path: Path) -> list[tuple[str, Array, Array]]:
    with reading(path), open(path, encoding="utf-8") as file:
        content = json.load(file, parse_float=_Floats().__getitem__)
        return [(user, *_samples(content["user_data"][user])) for user in content["users"]]


def _samples(data: dict[str, Any]) -> tuple[Array, Array]:
    x = np.asarray(data["x"], np.float32).reshape(len(data["x"]), 784)
    y = np.asarray(data["y"])
    if len(x) != len(y) or (len(y) and (y.dtype.kind != "i" or y.ndim != 1)):
        raise ValueError(f"a user has {len(x)} images and labels {y.dtype} {y.shape}")
    if x.size and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(f"pixels run from {x.min()} to {x.max()}: expected 0 to 1")
    return np.rint(x * 255).astype(np.uint8), y.astype(np.int64)


def _two_files() -> Layout:
    find = fixed_files("femnist", ("train.json", "test.json"))
    return Layout("femnist", "femnist/{train,test}.json", find, lambda files: read_leaf(files[:1], files[1:]))


def _many_files() -> Layout:
    def find(root: Path) -> Finding:
        files = {part: sorted((root / "femnist/data" / part).glob("*.json")) for part in ("train", "test")}
        missing = tuple(f"{part}/*.json" for part, found in files.items() if not found)
        return Finding((*files["train"], *files["test"]), missing)

    def read(files: Sequence[Path]) -> Arrays:
        parts = {part: [path for path in files if path.parent.name == part] for part in ("train", "test")}
        return read_leaf(parts["train"], parts["test"])

    return Layout("femnist/data", "femnist/data/{train,test}/*.json", find, read)


FEMNIST = Source(
    "femnist",
    62,
    "https://github.com/TalwalkarLab/leaf/tree/master/data/femnist",
    (_two_files(), _many_files()),
)
