"""Fits factors to a given weight, starting from existing factors: f = argmin ||W - compose(f)||.

Gauss-Newton steps from the start:

    r = W - compose(f),   d = argmin ||r - J d||,   f <- f + t d,   J = the derivative of compose at f

t is 1, or smaller if the distance ||r|| falls by much less than J foretells. If so for every t, f stays, and no step
makes a weight worse.
d comes from a few iterations of conjugate gradients for least squares (CGLS; Hestenes and Stiefel, 1952). They need
only the products J v and J^T u. Autograd computes both, so every scheme works.

Each factor is scaled to a root mean square of 1 before the iterations, so that fewer are needed. This also makes the
fitted weight independent of the scale (c X, Y / c) of the existing factors.

Exact iterations have orthogonal gradients s = J^T (r - J d). Rounding ends that after some iterations, and from then on
a difference in the last bits of W grows with every further one. So each s is made orthogonal to those before.

Weights of the same form are one batch. Each has its own iterations and its own t. The host reads one number from the
device per iteration, t and step. An iteration takes a GPU less time than the host needs to launch its 60 kernels, so
there it is recorded once and replayed (`cuda_graphs.py`).
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.func import vmap

from fedpara.cuda_graphs import CudaGraphs, Recorder

STEPS, ITERATIONS = 8, 40
"""The largest number of Gauss-Newton steps, and of iterations in a step."""
ENOUGH = 0.01
"""A weight counts as fitted once its distance is at most this share of the distance at the start."""
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


class Fit:
    """Refits batches of weights of one form, all of these shapes."""

    def __init__(self, compose: Callable[[Sequence[Tensor]], Tensor], start: Sequence[Tensor]) -> None:
        self.shapes = [factor.shape[1:] for factor in start]
        self._compose = compose
        self._search: _Search | None = None

    def composed(self, f: Tensor) -> Tensor:
        return vmap(lambda *factors: self._compose(factors))(*_apart(f, self.shapes)).flatten(1)

    def __call__(self, weights: Tensor, start: Sequence[Tensor], enough: float = ENOUGH) -> list[Tensor]:
        """The factors of each weight. Weights and factors have a leading dimension: the number of weights."""
        w, f = weights.flatten(1), torch.cat([factor.flatten(1) for factor in start], 1)
        search = self._search = self._search or _Search(self.composed, f, w)
        r = w - self.composed(f)
        rounding = 4 * torch.finfo(r.dtype).eps * _norm(w)
        goal = torch.maximum(enough * _norm(r), rounding)
        for _ in range(STEPS):
            before = _norm(r)
            d, foretold = search.direction(f, r, _scales(f, self.shapes), goal / 2)
            f, r = _moved(self.composed, w, f, r, d, SUFFICIENT * (before - foretold))
            after = _norm(r)
            if not ((after > goal) & (after < WORTHWHILE * before)).any():
                break
        return _apart(f, self.shapes)


class _Search:
    """The iterations of a step. Their tensors stay where they are, so that a GPU can replay what it recorded."""

    def __init__(self, composed: Compose, f: Tensor, w: Tensor) -> None:
        self._composed = composed
        self.f, self.scale, self.d, self.p = (torch.zeros_like(f) for _ in range(4))
        self.left = torch.zeros_like(w)
        self.gradients = f.new_zeros(len(f), ITERATIONS, f.shape[1])
        numbers = (f.new_zeros(len(f), 1) for _ in range(5))
        self.goal, self.longest, self.last, self.after, self.steepest = numbers
        self.k = torch.zeros(1, dtype=torch.int64, device=f.device)
        self.more = torch.zeros((), dtype=torch.bool, device=f.device)
        self._linearise: Callable[[], None] = self.linearise
        self._iterate: Callable[[int], None] = self.iterate
        if f.is_cuda:
            self._record(CudaGraphs(f.device))

    def _record(self, graphs: Recorder) -> None:
        graphs.warm_up(self.linearise)
        graphs.warm_up(self.iterate)
        self._linearise = graphs.record(self.linearise)
        self._linearise()
        replay = graphs.record(self.iterate)
        self._iterate = lambda k: replay()

    def direction(self, f: Tensor, r: Tensor, scale: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """(d, ||r - J d||), which is <= goal or near its least value.

        Scaled, d is orthogonal to what J does not see.
        """
        size = _norm(r)
        divisor = size.clamp_min(torch.finfo(r.dtype).tiny)
        self.f.copy_(f)
        self.scale.copy_(scale)
        self.left.copy_(r / divisor)
        self.goal.copy_(goal / divisor)
        self.longest.copy_(RADIUS * f.shape[1] ** 0.5 / divisor)
        for zero in (self.d, self.p, self.gradients, self.steepest, self.k):
            zero.zero_()
        for one in (self.last, self.after):
            one.fill_(1)
        self._linearise()
        for k in range(ITERATIONS):
            self._iterate(k)
            if not self.more:
                break
        return size * scale * self.d, size * self.after

    def linearise(self) -> None:
        """J v and J^T u at f. J^T u is linear in u, and its derivative by u is J^T: so J v takes two backwards."""
        with torch.enable_grad():
            f = self.f.detach().requires_grad_()
            w = self._composed(f)
            u = torch.zeros_like(w, requires_grad=True)
            (transposed,) = torch.autograd.grad(w, f, u, create_graph=True)
        self._forward = lambda v: torch.autograd.grad(transposed, u, v, retain_graph=True)[0]
        self._backward = lambda u: torch.autograd.grad(w, f, u, retain_graph=True)[0]

    def iterate(self, k: int = ITERATIONS) -> None:
        """Iteration `self.k`, which reads the first k gradients; the later ones are 0."""
        eps, tiny = torch.finfo(self.f.dtype).eps, torch.finfo(self.f.dtype).tiny
        s = _orthogonal(self.scale * self._backward(self.left), self.gradients[:, :k])
        slope, before = _norm(s), self.after.clone()
        torch.maximum(self.steepest, slope, out=self.steepest)
        self.gradients.index_copy_(1, self.k, (s / slope.clamp_min(tiny))[:, None])
        self.p.copy_(torch.addcmul(s, (slope / self.last.clamp_min(tiny)).square(), self.p))
        q = self._forward(self.scale * self.p)
        a = (slope / _norm(q).clamp_min(tiny)).square() * (
            slope > eps * self.steepest
        )  # below it is rounding
        length = _norm(torch.addcmul(self.d, a, self.p))
        shortened = torch.where(self.k == 0, a * self.longest / length, 0)
        a = torch.where(length > self.longest, shortened, a)
        self.d.addcmul_(a, self.p)
        self.left.addcmul_(a, q, value=-1)
        self.last.copy_(slope)
        self.after.copy_(_norm(self.left))
        self.more.copy_(((self.after > self.goal) & (self.after < STALLED * before)).any())
        self.k.add_(1)


def _orthogonal(s: Tensor, units: Tensor) -> Tensor:
    """s without its parts along orthogonal unit vectors, [weight, vector, entry]."""
    along = s[:, None] @ units.mT
    return torch.baddbmm(s[:, None], along, units, alpha=-1)[:, 0]


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
