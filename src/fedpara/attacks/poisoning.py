"""Attacks through a client's examples.

    label-flip             class c becomes classes - 1 - c
    backdoor(target, ...)  a share of the examples gets a bright square in the corner and the target's label;
                           the update may be scaled, as in model replacement (Bagdasaryan et al., 2020)

The hostile client then trains normally. It needs no knowledge of the other clients.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedpara.algorithms.local import AT_MOST_ONE, POSITIVE, check
from fedpara.attacks.core import Attack
from fedpara.attacks.sending import scaling
from fedpara.data import Examples
from fedpara.errors import ConfigError


def label_flip() -> Attack:
    """Trains on the wrong classes."""
    return Attack("label-flip", poison=_flipped)


def backdoor(target: int = 0, share: float = 0.5, scale: float = 1.0) -> Attack:
    """Teaches the model that images with a small bright square are of class `target`."""
    check(AT_MOST_ONE, share=share)
    check(POSITIVE, scale=scale)
    if target < 0:
        raise ConfigError(f"target is {target}: expected a class, from 0.")
    return Attack(
        "backdoor",
        send=scaling(scale).send if scale != 1 else None,
        poison=partial(_poisoned, target=target, share=share),
        triggered=partial(_triggered, target=target),
    )


def stamp(images: Tensor, brightest: float) -> Tensor:
    """The images with a square in the bottom right corner: an eighth of their height, at least two pixels."""
    size = max(2, images.shape[-2] // 8)
    stamped = images.clone()
    stamped[..., -size:, -size:] = brightest
    return stamped


def _flipped(examples: Examples, generator: np.random.Generator) -> Examples:
    if examples.classes is None:
        raise ConfigError("attack 'label-flip' needs examples with classes: these have other targets.")
    return replace(examples, targets=examples.classes - 1 - examples.targets)


def _poisoned(examples: Examples, generator: np.random.Generator, *, target: int, share: float) -> Examples:
    _expect_images(examples, target)
    count = round(share * len(examples))
    chosen = torch.from_numpy(generator.permutation(len(examples))[:count])
    inputs, targets = examples.inputs.clone(), examples.targets.clone()
    inputs[chosen] = stamp(inputs[chosen], _brightest(inputs))
    targets[chosen] = target
    return replace(examples, inputs=inputs, targets=targets)


def _triggered(test: Examples, *, target: int) -> Examples:
    _expect_images(test, target)
    others = test.subset(torch.nonzero(test.targets != target).flatten())
    inputs = stamp(others.inputs, _brightest(test.inputs))
    return replace(others, inputs=inputs, targets=torch.full_like(others.targets, target))


def _brightest(images: Tensor) -> float:
    return float(images.max()) if images.is_floating_point() else 255


def _expect_images(examples: Examples, target: int) -> None:
    if len(examples.shape) != 3 or examples.classes is None:
        raise ConfigError(f"attack 'backdoor' needs images with classes: the examples are {examples!r}.")
    if target >= examples.classes:
        raise ConfigError(
            f"attack 'backdoor' has target {target}: expected a class from 0 to {examples.classes - 1}."
        )
