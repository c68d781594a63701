"""Defence: how the server combines updates of which some may be hostile. It replaces the mean of an algorithm.

    weigh     x+ = refit(compose(x) + sum_i c_i u_i),   c from the inner products of the composed updates u_i
    combine   x+ = refit(the combination of compose(y_i), coordinate by coordinate)

Both read the clients' factors only through the weights they compose to, so rescaled factors change nothing. What an
algorithm sends beside the model, such as control variates, and BatchNorm's statistics are combined by the same c or
coordinate by coordinate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpara.algorithms import FromMean, Mean, Update, Variables
from fedpara.algorithms.core import custom, expect_tensor
from fedpara.data import Examples
from fedpara.errors import ConfigError
from fedpara.parameterization.composed import Blocks, exact_products
from fedpara.robust.coordinatewise import coordinatewise_median
from fedpara.robust.geometry import Geometry, among, median
from fedpara.state import State

LONGEST = 3.0
"""Variables beside the model are clipped to this many times their median norm."""


def _any(cohort: int) -> int:
    return 1


@dataclass(frozen=True)
class Defence:
    """A defence with either `weigh` or `combine`."""

    name: str
    weigh: Callable[[Geometry], Tensor] | None = None
    """geometry of n updates -> c [n]"""
    combine: Callable[[Tensor], Tensor] | None = None
    """[n, ...] -> [...]"""
    remember: Callable[[Geometry], Tensor] | None = None
    """geometry -> each client's standing after this round [n], which the next `Geometry.past` holds; 0 at first"""
    reference: Callable[[Geometry], Tensor] | None = None
    """geometry -> the updates whose median `Geometry.residual` uses [n]; None if `weigh` does not read the residual"""
    needs: Callable[[int], int] = _any
    """cohort -> the smallest number of clients for which the defence holds"""
    clean: int | Examples | None = None
    """the server's clean examples: how many to draw, or the examples"""

    def __post_init__(self) -> None:
        if (self.weigh is None) == (self.combine is None):
            both = "both weigh and" if self.weigh else "neither weigh nor"
            raise ConfigError(f"Defence {self.name!r} has {both} combine: give one of them.")


def robust_mean(
    defence: Defence,
    blocks: Blocks,
    x: State,
    updates: Sequence[Update],
    buffers: Sequence[State],
    aggregate: FromMean,
    own: State | None = None,
    past: Tensor | None = None,
) -> tuple[Mean, State, Tensor | None]:
    """(the defence's mean, that of the buffers, the clients' standings if the defence remembers them)

    `own` is the server's own model after training on its clean set. `past` are the standings before this round.
    """
    with exact_products(), torch.no_grad():
        if defence.combine is not None:
            return *_combined(_checked(defence), blocks, x, updates, buffers), None
        w = torch.tensor([aggregate.weight(update) for update in updates], dtype=torch.float64)
        ys = [update.y for update in updates]
        g = geometry(blocks, x, ys, w / w.sum(), own)
        g = replace(g, past=torch.zeros_like(w) if past is None else past)
        kept = g.norms.isfinite()  # composing finite factors may overflow
        c = torch.zeros_like(w)
        if kept.any():
            assert defence.weigh is not None
            usable = among(g, kept)
            if defence.reference is not None:
                finite = [ys[i] for i in kept.nonzero().flatten().tolist()]
                usable = replace(
                    usable, residual=residual(blocks, x, finite, usable, defence.reference(usable))
                )
            what = f"robust {defence.name!r}: weigh"
            with custom(what, "weigh(geometry)"):
                made = defence.weigh(usable)
            c[kept] = expect_tensor(what, made, usable.w.shape).to(c)
            if defence.remember is not None:
                past = g.past.clone()  # type: ignore[union-attr]
                past[kept] = defence.remember(usable)
        y = _moved(blocks, x, ys, c)
        share = c.clamp_min(0)
        extra = _extras(updates, share)
        total = float(share.sum())
        averages = _weighted(buffers, share, total) if total else _each(coordinatewise_median, buffers)
        return Mean(y, extra, len(updates)), averages, past if defence.remember is not None else None


def _checked(defence: Defence) -> Callable[[Tensor], Tensor]:
    """`combine`, with a check of what it returns."""
    what, combine = f"robust {defence.name!r}: combine", defence.combine
    assert combine is not None

    def combined(weights: Tensor) -> Tensor:
        with custom(what, "combine(weights [clients, ...])"):
            made = combine(weights)
        return expect_tensor(what, made, weights.shape[1:])

    return combined


def geometry(blocks: Blocks, x: State, ys: Sequence[State], w: Tensor, own: State | None = None) -> Geometry:
    """The inner products of the composed updates, one block at a time: only one composed block is in memory."""
    everyone = [*ys, own] if own is not None else list(ys)
    gram = torch.stack([_gram(u) for u in _composed_updates(blocks, x, everyone)]).sum(0).cpu()
    n = len(ys)
    trusted = (gram[:n, n], float(gram[n, n].sqrt())) if own is not None else None
    return Geometry(gram[:n, :n], w, trusted)


def residual(
    blocks: Blocks, x: State, ys: Sequence[State], g: Geometry, reference: Tensor
) -> tuple[Tensor, Tensor]:
    """(<r_li, r_lj> in each layer l, how many numbers l has), r_i = v_i - the median of v over the `reference`

    v_i is u_i, clipped to the median norm of the reference: long updates do not pull the median along.
    """
    tau = median(g.norms[reference])
    shortened = (tau / g.norms.clamp_min(1e-150)).clamp(max=1)[:, None]
    grams, sizes = [], []
    for u in _composed_updates(blocks, x, ys):
        v = u * shortened.to(u)
        r = v - coordinatewise_median(v if reference.all() else v[reference.to(v.device)])
        grams.append(_gram(r))
        sizes.append(r.shape[1])
    return torch.stack(grams).cpu(), torch.tensor(sizes, dtype=torch.float64)


def _gram(rows: Tensor) -> Tensor:
    """The inner products in float64. The rows stay in float32: a median sorts half as many bytes."""
    wide = rows.double()
    return wide @ wide.mT


def _composed_updates(blocks: Blocks, x: State, ys: Sequence[State]) -> Iterator[Tensor]:
    """compose(y_i) - compose(x) of each client as a row [n, numbers of the block], for each block."""
    for block in blocks.over(x):
        before = block.of(x)
        yield (block.of_all(list(ys), before) - before).flatten(1)


def _moved(blocks: Blocks, x: State, ys: Sequence[State], c: Tensor) -> State:
    """x moved by sum_i c_i u_i."""
    used = c.nonzero().flatten().tolist()
    weights: State = {}
    for block in blocks.over(x):
        weights[block.name] = before = block.of(x)
        if used:
            u = block.of_all([ys[i] for i in used], before) - before
            weights[block.name] = before + torch.tensordot(c[used].to(before), u, 1)
    return _ordered(blocks.refit(x, weights), x)


def _combined(
    combine: Callable[[Tensor], Tensor],
    blocks: Blocks,
    x: State,
    updates: Sequence[Update],
    buffers: Sequence[State],
) -> tuple[Mean, State]:
    weights: State = {}
    for block in blocks.over(x):
        before = block.of(x)
        w = block.of_all([update.y for update in updates], before)
        finite = w.flatten(1).isfinite().all(1)
        weights[block.name] = combine(w[finite]) if finite.any() else before
    y = _ordered(blocks.refit(x, weights), x)
    names = updates[0].extra
    extra = {name: _each(combine, [update.extra[name] for update in updates]) for name in names}
    return Mean(y, extra, len(updates)), _each(combine, buffers)


def _ordered(state: State, x: State) -> State:
    """The state in the order of x."""
    return {name: state[name] for name in x}


def _each(combine: Callable[[Tensor], Tensor], states: Sequence[Mapping[str, Tensor]]) -> State:
    """`combine` on every tensor. Integer tensors are combined as float64 and rounded."""
    made: State = {}
    for name, first in states[0].items():
        stacked = torch.stack([state[name] for state in states])
        if first.is_floating_point():
            made[name] = combine(stacked)
        else:
            made[name] = combine(stacked.double()).round().to(first.dtype)
    return made


def _weighted(states: Sequence[Mapping[str, Tensor]], c: Tensor, total: float) -> State:
    """sum_i c_i a_i / total; 0 if the total is 0."""
    share = c / total if total else c
    return _each(lambda stacked: torch.tensordot(share.to(stacked), stacked, 1), states)


def _extras(updates: Sequence[Update], c: Tensor) -> Variables:
    """The means by c of what clients send beside the model, each variable at most `LONGEST` times the median norm."""
    made: Variables = {}
    for name in updates[0].extra:
        states = [update.extra[name] for update in updates]
        norms = torch.stack([_norm(state) for state in states])
        shortened = (LONGEST * norms.quantile(0.5) / norms.clamp_min(1e-150)).clamp(max=1)
        made[name] = _weighted(states, c * shortened, float(c.sum()))
    return made


def _norm(state: Mapping[str, Tensor]) -> Tensor:
    squares = [tensor.double().square().sum().cpu() for tensor in state.values()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)
