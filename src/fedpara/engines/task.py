"""Task: what is learned, by which model, and how well.

The loss is the mean cross-entropy, the score the share of right answers.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedpara.data import Examples
from fedpara.errors import ConfigError, expect_kind

Augment = Literal["none", "crop-flip"]


@dataclass(frozen=True, eq=False)
class Task:
    """`model` may be factorized or plain. `augment` is what training images go through, each epoch anew."""

    model: nn.Module
    test: Examples | None = None
    augment: Augment = "none"

    def __post_init__(self) -> None:
        expect_kind("model", self.model, nn.Module, ConfigError)
        if self.test is not None:
            expect_kind("test", self.test, Examples, ConfigError)
        if self.augment not in ("none", "crop-flip"):
            raise ConfigError(f"augment is {self.augment!r}: expected 'none' or 'crop-flip'.")
