"""State = dict[str, Tensor], and its arithmetic.

A model's tensors are a state; algorithms transform states, messages and checkpoints store them.
The functions here return new tensors and keep the order of the names they are given.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedpara.errors import StateError
from fedpara.layout import runs

State = dict[str, Tensor]


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> State:
    """a + scale b. Integer tensors (BatchNorm's step counter) need a whole scale, such as 1 or -1."""
    same_names(a, b)
    if isinstance(scale, Tensor):  # a rate in a compiled step
        return {name: torch.addcmul(a[name], b[name], scale) for name in a}
    whole = int(scale) if scale == int(scale) else scale
    return {
        name: torch.add(a[name], b[name], alpha=scale if a[name].is_floating_point() else whole) for name in a
    }


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> State:
    """a - b"""
    return add(a, b, -1.0)


def scale(a: Mapping[str, Tensor], factor: float) -> State:
    return {name: tensor * factor for name, tensor in a.items()}


def zeros_like(a: Mapping[str, Tensor]) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in a.items()}


def clone(a: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in a.items()}


def mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
    """sum_i (w_i / sum w) a_i, summed in the order given, so that equal inputs give equal bits."""
    total = WeightedSum(float(sum(weights)))
    for state, weight in zip(states, weights, strict=True):
        total.add(state, weight)
    return total.mean()


class WeightedSum:
    """sum_i (w_i / W) a_i, one state at a time: only the sum is in memory.

    `total` is W, the sum of the expected weights; `mean` corrects for weights that did not arrive. Types narrower than
    float32 are summed in float32: a hundred bfloat16 terms would lose several percent. Integer tensors (BatchNorm's
    step counter) are averaged and rounded.
    """

    def __init__(self, total: float) -> None:
        self.total, self.arrived = total, 0.0
        self._types: dict[str, torch.dtype] | None = None
        self._sums: list[Tensor] = []

    def add(self, a: Mapping[str, Tensor], weight: float) -> None:
        self.arrived += weight
        if self._types is None:
            self._types = {name: tensor.dtype for name, tensor in a.items()}
            self._sums = [t.to(_summed_in(t.dtype)) * (weight / self.total) for t in a.values()]
            return
        same_names(self._types, a)
        theirs = [a[name] for name in self._types]
        if theirs:
            others = [
                t if t.dtype == s.dtype else t.to(s.dtype) for t, s in zip(theirs, self._sums, strict=True)
            ]
            torch._foreach_add_(self._sums, others, alpha=weight / self.total)

    def mean(self) -> State:
        """sum_i w_i a_i / sum_i w_i over the states added so far. Call it once, at the end."""
        if self._types is None:
            raise StateError("mean of 0 states: expected at least one.")
        if self.arrived != self.total and self._sums:
            torch._foreach_mul_(self._sums, self.total / self.arrived)
        return {
            name: (sum_ if dtype.is_floating_point else sum_.round()).to(dtype)
            for (name, dtype), sum_ in zip(self._types.items(), self._sums, strict=True)
        }


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.float64
    return dtype if dtype.itemsize >= 4 else torch.float32


def same_names(a: Mapping[str, object], b: Mapping[str, object]) -> None:
    """Raise StateError if the two states do not have the same names."""
    if a.keys() != b.keys():
        odd = sorted(a.keys() ^ b.keys())
        raise StateError(f"two states differ in names: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}")


def norm(a: Mapping[str, Tensor]) -> float:
    """sqrt(sum of squares over every entry)"""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in a.values()))


def all_finite(tensor: Tensor) -> bool:
    """Whether the tensor has no NaN and no infinity.

    x . x is finite only if every entry is, and takes one pass. Entries that overflow it are looked at one by one.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    return math.isfinite(torch.dot(flat, flat).item()) or bool(flat.isfinite().all())


def finite(a: Mapping[str, Tensor]) -> bool:
    """Whether every tensor is `all_finite`. Neighbours in memory are checked together."""
    return all(map(all_finite, runs(sorted(a.values(), key=Tensor.data_ptr))))


def device_of(states: Iterable[Mapping[str, Tensor]]) -> torch.device:
    """The device of the first tensor; the host if there is none."""
    return next((tensor.device for state in states for tensor in state.values()), torch.device("cpu"))


def nbytes(a: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in a.values())


def in_words(state: Mapping[str, Tensor]) -> str:
    """The size of a state, for a repr: `6 tensors, 85,002 numbers`."""
    numbers = sum(tensor.numel() for tensor in state.values())
    return f"{len(state)} tensor{'s' * (len(state) != 1)}, {numbers:,} number{'s' * (numbers != 1)}"
