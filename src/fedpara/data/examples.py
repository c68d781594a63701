"""Examples: inputs and targets as tensors. Images stay uint8, a quarter of the memory, until a batch is used.

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
from fedpara.trees import Tree, describe, leaves, map_tree, rows, take, to_device

Indices = Tensor | NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True, eq=False)
class Examples:
    """N examples. Inputs and targets are tensors, or tuples or dicts of tensors, with N rows each.

    inputs     uint8 [N, C, H, W] (images), integer ids, or floats of any shape
    targets    int64 [N] classes if `classes` is given; otherwise anything that the loss takes
    owners     int64 [N], the writer or role of each example
    mean, std  of the training set, per channel, on the 0..1 scale; None if the inputs are not images. Float inputs
               without a mean pass through unchanged.
    """

    inputs: Tree
    targets: Tree
    classes: int | None = None
    owners: Tensor | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for what, tree in (("inputs", self.inputs), ("targets", self.targets)):
            for part in leaves(tree):
                if not isinstance(part, Tensor):
                    raise DataError(
                        f"{what} are a {type(part).__name__}: expected tensors, such as torch.tensor(...)."
                    )
        count = len(self)
        for what, tree in (("inputs", self.inputs), ("targets", self.targets)):
            if any(tensor.shape[:1] != (count,) for tensor in leaves(tree)):
                raise DataError(
                    f"{what} are {describe(tree)}: expected {count} rows, one per example, as in the inputs."
                )
        if self.classes is not None:
            self._check_classes(self.classes)
        if self.mean is not None and (
            not isinstance(self.inputs, Tensor)
            or self.inputs.dim() != 4
            or len(self.mean) != self.inputs.shape[1]
        ):
            raise DataError(
                f"mean {self.mean} does not fit inputs {describe(self.inputs)}: expected one number per channel."
            )

    def _check_classes(self, classes: int) -> None:
        targets = self.targets
        if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.dtype != torch.int64:
            raise DataError(
                f"targets are {describe(targets)} with {classes} classes: expected int64 [{len(self)}], one class per "
                "example. Leave `classes` out for other targets."
            )
        if len(targets) and (targets.min() < 0 or targets.max() >= classes):
            low, high = targets.min(), targets.max()
            raise DataError(f"targets run from {low} to {high}: expected 0 to {classes - 1}.")

    def __len__(self) -> int:
        return len(leaves(self.inputs)[0])

    def __repr__(self) -> str:
        one = describe(self.inputs)
        if isinstance(self.inputs, Tensor):
            one = f"{self.dtype} of shape {list(self.shape)}"
        learned = f"targets {describe(self.targets)}" if self.classes is None else f"{self.classes} classes"
        owners = ", with owners" * (self.owners is not None)
        return f"Examples({len(self):,} examples, {one}, {learned}{owners}, {self.device})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example; () if the inputs are not a single tensor."""
        return tuple(self.inputs.shape[1:]) if isinstance(self.inputs, Tensor) else ()

    @property
    def dtype(self) -> str:
        """The type of the inputs, such as "uint8"."""
        return str(leaves(self.inputs)[0].dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        return leaves(self.inputs)[0].device

    def on(self, device: torch.device) -> "Examples":
        """The examples on a device."""
        return self._with(to_device(self.inputs, device), to_device(self.targets, device), self.owners)

    def normalised(self) -> Tree:
        """The inputs as a model takes them."""
        return normalise(self.inputs, self.mean, self.std)

    def checked(self, indices: Indices) -> Tensor:
        """The indices as an int64 tensor. DataError if they are not integers, or out of range."""
        # A copy: torch warns about sharing the read-only arrays of a Partition.
        index = indices if isinstance(indices, Tensor) else torch.from_numpy(np.array(indices))
        if index.dim() != 1 or (len(index) and (index.is_floating_point() or index.dtype == torch.bool)):
            raise DataError(f"indices are {describe(index)}: expected a row of integers.")
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            low, high = index.min(), index.max()
            raise DataError(f"indices run from {low} to {high}: expected 0 to {len(self) - 1}.")
        return index.long()

    def no_class(self, classes: int, ignored: int) -> tuple[int, int] | None:
        """(row, target) of the first target that is neither 0 to classes - 1 nor `ignored`; None if all are."""
        targets = self.targets
        if not isinstance(targets, Tensor) or targets.is_floating_point() or not targets.numel():
            return None
        wrong = ((targets < 0) & (targets != ignored)) | (targets >= classes)
        if not bool(wrong.any()):
            return None
        first = tuple(wrong.nonzero()[0].tolist())
        return first[0], int(targets[first])

    def subset(self, indices: Indices) -> "Examples":
        """The examples at `indices`, in that order; an index may repeat."""
        index = self.checked(indices).to(self.device)
        owners = None if self.owners is None else self.owners.index_select(0, index)
        return self._with(take(self.inputs, index), take(self.targets, index), owners)

    def part(self, rows_: slice) -> "Examples":
        """A range of the examples, without a copy."""
        owners = None if self.owners is None else self.owners[rows_]
        return self._with(rows(self.inputs, rows_), rows(self.targets, rows_), owners)

    def room(self, count: int) -> "Examples":
        """Uninitialised memory for `count` examples like these."""
        inputs, targets = (
            map_tree(lambda tensor: tensor.new_empty((count, *tensor.shape[1:])), tree)
            for tree in (self.inputs, self.targets)
        )
        return self._with(inputs, targets, None)

    def fill(self, others: "Examples") -> None:
        """Overwrites these examples by as many others."""
        for here, there in ((self.inputs, others.inputs), (self.targets, others.targets)):
            map_tree(lambda old, new: old.copy_(new), here, there)

    def _with(self, inputs: Tree, targets: Tree, owners: Tensor | None) -> "Examples":
        part = copy(self)  # not `replace`, which would check the examples again
        for name, value in (("inputs", inputs), ("targets", targets), ("owners", owners)):
            object.__setattr__(part, name, value)
        return part


def normalise(inputs: Tree, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tree:
    """(x - mean) / std in float32, with bytes as x / 255. Without a mean, ids become int64; floats and bools stay."""
    if mean is None or std is None:
        return map_tree(lambda t: t if t.is_floating_point() or t.dtype == torch.bool else t.long(), inputs)
    return (unit_scale(inputs) - _per_channel(tuple(mean), inputs.device)) / _per_channel(
        tuple(std), inputs.device
    )


def unit_scale(inputs: Tensor) -> Tensor:
    """The inputs in float32 on the 0..1 scale: bytes are divided by 255, floats are on that scale already."""
    return inputs.float() if inputs.is_floating_point() else inputs.float() / 255


@lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
