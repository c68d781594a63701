"""Task: the model to train, and how it is scored.

The loss is the mean cross-entropy; the score is the share of correct predictions.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from fedpara.data import Examples
from fedpara.errors import ConfigError

Augment = Literal["none", "crop-flip"]


@dataclass(frozen=True, eq=False)
class Task:
    """`model` may be factorized or plain. `augment` changes training images, with new draws in each epoch."""

    model: nn.Module
    test: Examples | None = None
    augment: Augment = "none"

    def __post_init__(self) -> None:
        if self.augment not in get_args(Augment):
            raise ConfigError(f"augment is {self.augment!r}: expected one of {', '.join(get_args(Augment))}.")
