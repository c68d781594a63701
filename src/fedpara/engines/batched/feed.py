"""Feed: what the lanes read step by step: a round's plan, the examples, and the counter of steps.

A captured step reads it at fixed addresses. Its shapes depend on the number of examples and of steps. Those of a
`Batch` do not, so a step that is compiled for batches serves every plan, seed and split with as many lanes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpara.data import Examples
from fedpara.engines.batched.round_plan import RoundPlan
from fedpara.trees import Tree, leaves, map_tree, take


@dataclass(frozen=True)
class Batch:
    """What all lanes read in one step. The rows of `inputs` and `targets` are those of the lanes, one after another."""

    inputs: Tree  # as they are stored: bytes are neither scaled nor cropped yet
    targets: Tree
    sizes: Tensor  # int64 [lane]: examples in the batch, 0 once the lane is done
    seeds: Tensor  # int64 [lane]
    rates: Tensor  # [lane]: learning rates
    crops: Tensor | None  # uint8 [lane, 3, row], with crop-flip augmentation

    @property
    def lanes(self) -> int:
        return len(self.sizes)

    @property
    def width(self) -> int:
        """The number of rows per lane."""
        return len(leaves(self.inputs)[0]) // self.lanes

    def tensors(self) -> list[Tensor]:
        return all_tensors(vars(self))

    def holding(self, tensors: Sequence[Tensor]) -> "Batch":
        """The same structure with other tensors, in the order of `tensors()`."""
        return Batch(**with_tensors(vars(self), tensors))


@dataclass
class Feed:
    plan: Tensor  # int64 [lane, step, batch]
    sizes: Tensor  # int64 [lane, step]
    seeds: Tensor  # int64 [lane, step]
    rates: Tensor  # [lane, step]
    crops: Tensor | None  # uint8 [lane, step, 3, batch]
    counter: Tensor  # int64 [1]
    inputs: Tree
    targets: Tree

    def next(self) -> Batch:
        """The batch at the counter. Advances the counter."""
        made = self._at(self.counter)
        self.counter.add_(1)
        return made

    def first(self) -> Batch:
        """The batch of the first step. The counter may be at the end of an earlier round."""
        return self._at(torch.zeros_like(self.counter))

    def _at(self, step: Tensor) -> Batch:
        def now(tensor: Tensor) -> Tensor:
            return tensor.index_select(1, step)[:, 0]

        index = now(self.plan).reshape(-1)
        return Batch(
            take(self.inputs, index),
            take(self.targets, index),
            now(self.sizes),
            now(self.seeds),
            now(self.rates),
            None if self.crops is None else now(self.crops),
        )

    def fill(self, plan: RoundPlan) -> None:
        """Copies in a round's plan."""
        steps, width = plan.steps, plan.width
        # No index of an earlier round stays: it may lie beyond this cohort's examples. Padding is the client's own.
        self.plan.zero_()
        self.plan[:, :steps, :width].copy_(torch.from_numpy(plan.index))
        self.plan[:, :steps, width:].copy_(self.plan[:, :steps, :1])
        self.sizes.zero_()
        self.sizes[:, :steps].copy_(torch.from_numpy(plan.sizes))
        self.seeds[:, :steps].copy_(torch.from_numpy(plan.seeds))
        self.rates[:, :steps].copy_(torch.from_numpy(plan.rates))
        if self.crops is not None and plan.crops is not None:
            self.crops[:, :steps, :, :width].copy_(torch.from_numpy(plan.crops))

    @property
    def room(self) -> int:
        """The number of examples that fit in the allocated memory."""
        return len(leaves(self.inputs)[0])

    def hold(self, examples: Examples) -> None:
        """Makes these the cohort's examples.

        On a GPU they are copied into the allocated memory, because captured steps read fixed addresses.
        """
        if examples.device == self.counter.device:
            self.inputs, self.targets = examples.inputs, examples.targets
            return
        for room, held in ((self.inputs, examples.inputs), (self.targets, examples.targets)):
            map_tree(lambda there, here: there[: len(here)].copy_(here), room, held)

    def release(self, examples: Examples) -> None:
        """On a CPU, replaces the last cohort's examples by these.

        The memory of the last cohort is then free before the next cohort is read.
        """
        if examples.device == self.counter.device:
            self.hold(examples)


def allocate_feed(shape: tuple[int, int, int], crops: bool, examples: Examples, dtype: torch.dtype) -> Feed:
    """A Feed of `shape` = (lanes, steps, batch) on the examples' device, with learning rates of this type."""
    device = examples.device
    return Feed(
        plan=torch.zeros(shape, dtype=torch.int64, device=device),
        sizes=torch.zeros(shape[:2], dtype=torch.int64, device=device),
        seeds=torch.zeros(shape[:2], dtype=torch.int64, device=device),
        rates=torch.zeros(shape[:2], dtype=dtype, device=device),
        crops=torch.zeros((*shape[:2], 3, shape[2]), dtype=torch.uint8, device=device) if crops else None,
        counter=torch.zeros(1, dtype=torch.int64, device=device),
        inputs=examples.inputs,
        targets=examples.targets,
    )


def all_tensors(nested: Tree) -> list[Tensor]:
    """The tensors in nested dicts and tuples, in order. None entries are skipped."""
    found: list[Tensor] = []
    _each(found.append, nested)
    return found


def with_tensors(nested: Tree, tensors: Sequence[Tensor]) -> Any:
    """The same structure with other tensors, in the order of `all_tensors`."""
    given = iter(tensors)
    return _each(lambda _: next(given), nested)


def _each(f: Callable[[Tensor], Any], nested: Tree) -> Any:
    return map_tree(lambda tensor: None if tensor is None else f(tensor), nested)
