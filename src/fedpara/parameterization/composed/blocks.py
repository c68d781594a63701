"""Composed updates: what a client changes in the weights, whatever its factors look like.

    u_i = compose(y_i) - compose(x)   for each factorized weight
    u_i = y_i - x                     for every other tensor

Factors have a free scale: (c X, Y / c) gives the same weight. Distances and medians on factors can therefore be misled,
and those on composed updates cannot. `refit` returns to factors, starting from those of x:

    x+ = argmin ||compose(x+) - (compose(x) + u)||

so the next factors depend on the clients only through their composed weights. `gauss_newton.py` finds them.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import vmap

from fedpara.parameterization.composed.gauss_newton import Fit
from fedpara.parameterization.schemes import Form
from fedpara.state import State

Compose = Callable[[Sequence[Tensor]], Tensor]

BATCH = 1 << 24
"""The largest number of entries of the weights that are refitted together, unless one weight has more."""


@dataclass(frozen=True)
class Block:
    """One tensor of the plain model: the names of the shared tensors it is made of, and how."""

    name: str
    parts: tuple[str, ...]
    compose: Compose | None = None  # None: the tensor itself
    kind: Hashable = None  # blocks of one kind have the same compose

    def of(self, state: Mapping[str, Tensor]) -> Tensor:
        parts = [state[name] for name in self.parts]
        return parts[0] if self.compose is None else self.compose(parts)

    def of_all(self, states: Sequence[Mapping[str, Tensor]], like: Tensor) -> Tensor:
        """[client, ...] in the type and on the device of `like`."""
        stacked = [torch.stack([state[name] for state in states]).to(like) for name in self.parts]
        return stacked[0] if self.compose is None else vmap(lambda *parts: self.compose(parts))(*stacked)  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The plain model's tensors, from the shared tensors of a factorized one. Without forms they are the same."""

    forms: Mapping[str, Form] = field(default_factory=dict)
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    """Frozen factors of weights that also have trained ones."""
    fits: dict[Hashable, Fit] = field(default_factory=dict, repr=False)
    """On a GPU: what is recorded for the batches of a refit."""

    def over(self, x: Mapping[str, Tensor]) -> Iterator[Block]:
        taken: set[str] = set()
        for weight, form in self.forms.items():
            names = [f"{weight}.{factor}" for factor in form.factors]
            shared = tuple(name for name in names if name in x)
            if shared:
                taken |= set(shared)
                filled = any(name in self.fixed for name in names)
                kind = weight if filled else (form, tuple(name.removeprefix(weight) for name in shared))
                yield Block(weight, shared, self._composer(form, names, shared, x[shared[0]]), kind)
        for name in x:
            if name not in taken:
                yield Block(name, (name,))

    def _composer(self, form: Form, names: Sequence[str], shared: Sequence[str], like: Tensor) -> Compose:
        whole = form if form.base is None else _without_base(form)
        if len(shared) == len(names):
            return whole.compose
        if all(name in self.fixed for name in names if name not in shared):
            fixed = {name: self.fixed[name].to(like) for name in names if name not in shared}
            return lambda parts: whole.compose(_filled(names, shared, parts, fixed))
        # pFedPara: the server sees W1 only, and W = s(W1) * (s(W2) + 1) is linear in s(W1).
        return lambda parts: form.scheme.s(whole.inner(list(parts))[0])

    def refit(self, x: State, weights: Mapping[str, Tensor]) -> State:
        """The tensors of the blocks that have a composed weight here, near those of x."""
        found: State = {}
        alike: dict[Hashable, list[Block]] = defaultdict(list)
        for block in self.over(x):
            if block.name in weights and block.compose is not None:
                alike[block.kind].append(block)
            elif block.name in weights:
                found[block.name] = weights[block.name].to(x[block.name])
        for blocks in alike.values():
            together = max(1, BATCH // weights[blocks[0].name].numel())
            for first in range(0, len(blocks), together):
                found |= self._refitted(blocks[first : first + together], x, weights)
        return found

    def _refitted(self, blocks: Sequence[Block], x: State, weights: Mapping[str, Tensor]) -> State:
        """The tensors of blocks of one kind."""
        start = [
            torch.stack([x[name] for name in alike]) for alike in zip(*(b.parts for b in blocks), strict=True)
        ]
        factors = self._fit(blocks, start)(torch.stack([weights[block.name] for block in blocks]), start)
        return {
            name: factor[i].clone()
            for i, block in enumerate(blocks)
            for name, factor in zip(block.parts, factors, strict=True)
        }

    def _fit(self, blocks: Sequence[Block], start: Sequence[Tensor]) -> Fit:
        compose = blocks[0].compose
        assert compose is not None
        if not start[0].is_cuda:
            return Fit(compose, start)
        key = (blocks[0].kind, len(blocks), start[0].dtype, start[0].device)
        if key not in self.fits:
            self.fits[key] = Fit(compose, start)
        return self.fits[key]


def _filled(
    names: Sequence[str], shared: Sequence[str], parts: Sequence[Tensor], fixed: Mapping[str, Tensor]
) -> list[Tensor]:
    given = {**fixed, **dict(zip(shared, parts, strict=True))}
    return [given[name] for name in names]


def _without_base(form: Form) -> Form:
    """The form of the change alone: W0 is the same for all clients."""
    return replace(form, base=None)


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products in full float32 on a GPU. Engines may allow tf32, whose rounding is as large as an update."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
