"""Factors near those that one has, whose weight is nearest to a given one: f = argmin ||W - compose(f)||.

Gauss-Newton steps from the start:

    r = W - compose(f),   d = argmin ||r - J d||,   f <- f + t d,   J = the derivative of compose at f

t is 1, or smaller if the distance ||r|| falls by much less than J foretells. If so for every t, f stays, and no step
makes a weight worse.
d comes from a few iterations of conjugate gradients for least squares (CGLS; Hestenes and Stiefel, 1952). They need
only the products J v and J^T u. Autograd computes both, so every scheme works.

Each factor is scaled to a root mean square of 1 before the iterations: fewer are needed. Also, the scales of
the factors that one has, (c X, Y / c), do not change the weight that is found.

Exact iterations have orthogonal gradients s = J^T (r - J d). Rounding ends that after some iterations, and from then on
a difference in the last bits of W grows with every further one. So each s is made orthogonal to those before.

Weights of the same form are one batch. Each has its own iterations and its own t. The host reads one number from the
device per iteration, t and step: on a GPU, waiting for such numbers takes longer than computing them.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.func import vmap

STEPS, ITERATIONS = 8, 40
"""The largest number of Gauss-Newton steps, and of iterations in a step."""
ENOUGH = 0.01
"""A weight is fitted at this share of the distance that its start has."""
WORTHWHILE = 0.9
"""The steps end when the last one reduced no weight's distance to this share."""
STALLED = 0.9998
"""The iterations of a step end when the last one reduced no weight's ||r - J d|| to this share."""
RADIUS = 0.3
"""A step changes the factors by no more than this share of their root mean square. J describes no longer ones."""
TRIALS = 6
"""t is 1, 1/2, ..., 1/32."""
SUFFICIENT = 0.25
"""The distance has to fall by this share of t (||r|| - ||r - J d||)."""

Compose = Callable[[Tensor], Tensor]
"""[weight, entries of all its factors] -> [weight, its entries]"""


def refit(
    compose: Callable[[Sequence[Tensor]], Tensor],
    weights: Tensor,
    start: Sequence[Tensor],
    enough: float = ENOUGH,
) -> list[Tensor]:
    """The factors of each weight. Weights and factors have a leading dimension: the number of weights."""
    shapes = [factor.shape[1:] for factor in start]

    def composed(f: Tensor) -> Tensor:
        return vmap(lambda *factors: compose(factors))(*_apart(f, shapes)).flatten(1)

    w, f = weights.flatten(1), torch.cat([factor.flatten(1) for factor in start], 1)
    r = w - composed(f)
    rounding = 4 * torch.finfo(r.dtype).eps * _norm(w)
    goal = torch.maximum(enough * _norm(r), rounding)
    for _ in range(STEPS):
        before = _norm(r)
        d, foretold = _direction(composed, f, r, _scales(f, shapes), goal / 2)
        f, r = _moved(composed, w, f, r, d, SUFFICIENT * (before - foretold))
        after = _norm(r)
        if not ((after > goal) & (after < WORTHWHILE * before)).any():
            break
    return _apart(f, shapes)


def _direction(composed: Compose, f: Tensor, r: Tensor, scale: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """(d, ||r - J d||), which is <= goal or near its least value. Scaled, d is orthogonal to what J does not see."""
    forward, backward = _products(composed, f)
    size, eps, tiny = _norm(r), torch.finfo(r.dtype).eps, torch.finfo(r.dtype).tiny
    goal, left = goal / size.clamp_min(tiny), r / size.clamp_min(tiny)
    longest = RADIUS * f.shape[1] ** 0.5 / size.clamp_min(tiny)
    d = p = torch.zeros_like(f)
    last, after, steepest = torch.ones_like(size), torch.ones_like(size), torch.zeros_like(size)
    gradients = f.new_empty(len(f), ITERATIONS, f.shape[1])
    for k in range(ITERATIONS):
        s = _orthogonal(scale * backward(left), gradients[:, :k])
        slope, before = _norm(s), after
        steepest = torch.maximum(steepest, slope)
        gradients[:, k] = s / slope.clamp_min(tiny)
        p = torch.addcmul(s, (slope / last.clamp_min(tiny)).square(), p)
        q = forward(scale * p)
        a = (slope / _norm(q).clamp_min(tiny)).square() * (slope > eps * steepest)  # below it is rounding
        length = _norm(torch.addcmul(d, a, p))
        a = torch.where(length > longest, a * longest / length if k == 0 else 0, a)
        d, left = torch.addcmul(d, a, p), torch.addcmul(left, a, q, value=-1)
        last, after = slope, _norm(left)
        if not ((after > goal) & (after < STALLED * before)).any():
            break
    return size * scale * d, size * after


def _orthogonal(s: Tensor, units: Tensor) -> Tensor:
    """s without its parts along orthogonal unit vectors, [weight, vector, entry]."""
    along = s[:, None] @ units.mT
    return torch.baddbmm(s[:, None], along, units, alpha=-1)[:, 0]


def _products(composed: Compose, f: Tensor) -> tuple[Compose, Compose]:
    """(v -> J v, u -> J^T u) at f. J^T u is linear in u, and its derivative by u is J^T: so J v takes two backwards."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        w = composed(f)
        u = torch.zeros_like(w, requires_grad=True)
        (transposed,) = torch.autograd.grad(w, f, u, create_graph=True)
    return (
        lambda v: torch.autograd.grad(transposed, u, v, retain_graph=True)[0],
        lambda u: torch.autograd.grad(w, f, u, retain_graph=True)[0],
    )


def _moved(
    composed: Compose, w: Tensor, f: Tensor, r: Tensor, d: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor]:
    """(f + t d, its r) with the largest t for which the distance falls by more than t gain; (f, r) if there is none."""
    distance = _norm(r)
    t = torch.ones_like(distance)
    for _ in range(TRIALS):
        trial = torch.addcmul(f, t, d)
        left = w - composed(trial)
        better = _norm(left) < distance - t * gain
        if better.all():
            break
        t = torch.where(better, t, t / 2)
    return torch.where(better, trial, f), torch.where(better, left, r)


def _scales(f: Tensor, shapes: Sequence[torch.Size]) -> Tensor:
    """The root mean square of the factor that each entry belongs to; 1 for a factor of zeros."""
    parts = f.split([prod(shape) for shape in shapes], 1)
    scales = [part.square().mean(1, keepdim=True).sqrt().expand_as(part) for part in parts]
    found = torch.cat(scales, 1)
    return torch.where(found > 0, found, 1)


def _apart(f: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The factors, from all their entries."""
    parts = f.split([prod(shape) for shape in shapes], 1)
    return [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]


def _norm(v: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    return norms
