"""`generated:cifar10`: a small random set with the shape, classes and owners of the named one, to try out a run.

An image is the pattern of its class plus noise; a text is random characters of which the last determines the label. The
set is always the same, and its scores say nothing about the real set.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedpara.data.examples import Examples
from fedpara.data.sources import Array, build_images, images
from fedpara.errors import ConfigError, among


@dataclass(frozen=True)
class Kind:
    shape: tuple[int, ...]
    classes: int
    owners: int = 0


KINDS = {
    "cifar10": Kind((3, 32, 32), 10),
    "cifar100": Kind((3, 32, 32), 100),
    "cinic10": Kind((3, 32, 32), 10),
    "mnist": Kind((1, 28, 28), 10),
    "fashion-mnist": Kind((1, 28, 28), 10),
    "femnist": Kind((1, 28, 28), 62, owners=12),
    **dict.fromkeys(("shakespeare", "shakespeare-100", "shakespeare-100-mixed"), Kind((80,), 80, owners=12)),
}
TRAIN, TEST = 120, 40
SEED = 0


def load(name: str) -> tuple[Examples, Examples]:
    if name not in KINDS:
        raise ConfigError(f"no generated set is called {name!r}: {among(name, KINDS)}")
    kind = KINDS[name]
    generator = np.random.default_rng(SEED)
    return _text(kind, generator) if len(kind.shape) == 1 else _images(kind, generator)


def _images(kind: Kind, generator: np.random.Generator) -> tuple[Examples, Examples]:
    patterns = generator.integers(0, 256, (kind.classes, *kind.shape))

    def part(count: int) -> tuple[Array, Array]:
        labels = np.arange(count) % kind.classes
        noise = generator.integers(0, 256, (count, *kind.shape))
        return ((patterns[labels] + noise) // 2).astype(np.uint8), labels

    train, test = part(TRAIN), part(TEST)
    owners = (_owners(TRAIN, kind), _owners(TEST, kind)) if kind.owners else None
    return build_images(images(train, test, owners), kind.classes)


def _text(kind: Kind, generator: np.random.Generator) -> tuple[Examples, Examples]:
    following = torch.from_numpy(generator.permutation(kind.classes))

    def part(count: int) -> Examples:
        inputs = torch.from_numpy(generator.integers(0, kind.classes, (count, *kind.shape)).astype(np.uint8))
        owners = torch.from_numpy(_owners(count, kind).astype(np.int64))
        return Examples(inputs, following[inputs[:, -1].long()], kind.classes, owners)

    return part(TRAIN), part(TEST)


def _owners(count: int, kind: Kind) -> Array:
    return np.arange(count) % kind.owners
