"""Examples: what a set holds, as tensors. Images stay uint8 until a batch is used: a quarter of the memory.

normalise: (x / 255 - mean) / std, per channel; character ids pass through.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpara.errors import DataError

Indices = Tensor | NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True, eq=False)
class Examples:
    """inputs uint8 [N, C, H, W] (images), integer [N, 80] (character ids) or floats of any shape, which pass through
    as they are; labels int64 [N] < classes.

    `owners` int64 [N] is the writer or role of each example. `mean` and `std` are per channel on the
    0..1 scale, those of the training set; None where the inputs are not images.
    """

    inputs: Tensor
    labels: Tensor
    classes: int
    owners: Tensor | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (("inputs", self.inputs), ("labels", self.labels)):
            if not isinstance(value, Tensor):
                raise DataError(
                    f"{name} are a {type(value).__name__}: expected a tensor, as torch.as_tensor makes."
                )
        count = len(self.inputs) if self.inputs.dim() else 0
        if self.labels.shape != (count,) or self.labels.dtype != torch.int64:
            raise DataError(
                f"labels are {_kind(self.labels)} for inputs {_kind(self.inputs)}: "
                "expected one int64 label an example."
            )
        if self.owners is not None and (self.owners.shape != (count,) or self.owners.dtype != torch.int64):
            raise DataError(f"owners are {_kind(self.owners)}: expected int64 of length {count}.")
        if count:
            low, high = (int(bound) for bound in torch.aminmax(self.labels))
            if low < 0 or high >= self.classes:
                raise DataError(f"labels run from {low} to {high}: expected 0 to {self.classes - 1}.")
        if (self.mean is None) != (self.std is None):
            raise DataError("mean and std come together: one of them is missing.")
        if self.mean is not None and self.std is not None:
            for name in ("mean", "std"):
                object.__setattr__(self, name, _by_channel(name, getattr(self, name)))
            channels = self.inputs.shape[1] if self.inputs.dim() == 4 else 0
            if len(self.mean) != channels or len(self.std) != channels or min(self.std, default=0) <= 0:
                raise DataError(
                    f"mean {self.mean} and std {self.std} do not fit inputs {_kind(self.inputs)}: "
                    "expected a mean and a positive std a channel."
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
        """The indices as int64, if they are a row of integers and of examples that there are."""
        index = _index(indices)
        if len(index):
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= len(self):
                raise DataError(f"indices run from {low} to {high}: expected 0 to {len(self) - 1}.")
        return index

    def subset(self, indices: Indices) -> "Examples":
        """The examples at `indices`, in their order; repeats are kept."""
        index = self.checked(indices).to(self.labels.device)
        part = copy(self)  # what holds of all examples holds of these: nothing to check again
        object.__setattr__(part, "inputs", self.inputs.index_select(0, index))
        object.__setattr__(part, "labels", self.labels.index_select(0, index))
        if self.owners is not None:
            object.__setattr__(part, "owners", self.owners.index_select(0, index))
        return part


def normalise(inputs: Tensor, mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> Tensor:
    """(x - mean) / std in float32, bytes as x / 255. Without a mean: ids become int64, floating features stay."""
    if (mean is None) != (std is None):
        raise DataError("mean and std come together: one of them is missing.")
    if mean is None or std is None:
        return inputs if inputs.is_floating_point() else inputs.long()
    return (unit_scale(inputs) - _per_channel(mean, inputs.device)) / _per_channel(std, inputs.device)


def unit_scale(inputs: Tensor) -> Tensor:
    """In float32, on the 0..1 scale of a mean and std: where bytes go, and where floats are already."""
    return inputs.float() if inputs.is_floating_point() else inputs.float() / 255


@lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def _index(indices: Indices) -> Tensor:
    # A copy: torch warns about sharing the read-only arrays of a Partition.
    index = indices if isinstance(indices, Tensor) else torch.from_numpy(np.array(indices))
    if index.dim() != 1 or (len(index) and (index.is_floating_point() or index.dtype == torch.bool)):
        raise DataError(f"indices are {_kind(index)}: expected a row of integers.")
    return index.long()


def _by_channel(name: str, values: Any) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise DataError(
            f"{name} is {values!r}: expected a number a channel, such as (0.5, 0.5, 0.5)."
        ) from None
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{name} is {values!r}: expected finite numbers.")
    return numbers


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
