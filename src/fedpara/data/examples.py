"""Examples: inputs and labels as tensors. Images stay uint8, a quarter of the memory, until a batch is used.

normalise: (x / 255 - mean) / std, per channel; character ids pass through.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpara.errors import DataError

Indices = Tensor | NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs uint8 [N, C, H, W] (images), integer [N, 80] (character ids) or float of any shape; labels int64 [N].

    `owners` int64 [N] is the writer or role of each example. `mean` and `std` are the training set's, per channel, on
    the 0..1 scale; None if the inputs are not images. Float inputs without a mean pass through unchanged.
    """

    inputs: Tensor
    labels: Tensor
    classes: int
    owners: Tensor | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        count = len(self.inputs)
        if self.labels.shape != (count,) or self.labels.dtype != torch.int64:
            raise DataError(f"labels are {_kind(self.labels)}: expected int64 [{count}], one per example.")
        if count and (self.labels.min() < 0 or self.labels.max() >= self.classes):
            low, high = self.labels.min(), self.labels.max()
            raise DataError(f"labels run from {low} to {high}: expected 0 to {self.classes - 1}.")
        if self.mean is not None and (self.inputs.dim() != 4 or len(self.mean) != self.inputs.shape[1]):
            raise DataError(
                f"mean {self.mean} does not fit inputs {_kind(self.inputs)}: expected one number per channel."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        inputs = f"{str(self.inputs.dtype).removeprefix('torch.')} of shape {list(self.shape)}"
        owners = ", with owners" * (self.owners is not None)
        return f"Examples({len(self):,} examples, {inputs}, {self.classes} classes{owners}, {self.labels.device})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.inputs.shape[1:])

    def checked(self, indices: Indices) -> Tensor:
        """The indices as an int64 tensor. DataError if they are not integers, or out of range."""
        # A copy: torch warns about sharing the read-only arrays of a Partition.
        index = indices if isinstance(indices, Tensor) else torch.from_numpy(np.array(indices))
        if index.dim() != 1 or (len(index) and (index.is_floating_point() or index.dtype == torch.bool)):
            raise DataError(f"indices are {_kind(index)}: expected a row of integers.")
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            low, high = index.min(), index.max()
            raise DataError(f"indices run from {low} to {high}: expected 0 to {len(self) - 1}.")
        return index.long()

    def subset(self, indices: Indices) -> "Examples":
        """The examples at `indices`, in that order; an index may repeat."""
        index = self.checked(indices).to(self.labels.device)
        part = copy(self)  # not `replace`, which would check the examples again
        object.__setattr__(part, "inputs", self.inputs.index_select(0, index))
        object.__setattr__(part, "labels", self.labels.index_select(0, index))
        if self.owners is not None:
            object.__setattr__(part, "owners", self.owners.index_select(0, index))
        return part


def normalise(inputs: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """(x - mean) / std in float32, with bytes as x / 255. Without a mean, ids become int64 and floats stay."""
    if mean is None or std is None:
        return inputs if inputs.is_floating_point() else inputs.long()
    return (unit_scale(inputs) - _per_channel(tuple(mean), inputs.device)) / _per_channel(
        tuple(std), inputs.device
    )


def unit_scale(inputs: Tensor) -> Tensor:
    """The inputs in float32 on the 0..1 scale: bytes are divided by 255, floats are on that scale already."""
    return inputs.float() if inputs.is_floating_point() else inputs.float() / 255


@lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
