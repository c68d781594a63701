"""Factors for a trained weight: min ||W - compose(factors)||.

No closed form exists for a Hadamard product of low-rank weights, so quasi-Newton steps (L-BFGS) run from
the starts of `Scheme.split` and the best candidate is kept:

    truncation   W1 = the rank-R truncated SVD of W (HOSVD for a kernel), W2 = all ones (zeros for pFedPara)
    root         W1 = truncation of sign(W) sqrt|W|, W2 = truncation of sqrt|W| (FedPara only)

The truncation itself is a candidate, so the result is never worse than it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedpara.errors import SchemeError
from fedpara.parameterization.compose import wide
from fedpara.parameterization.schemes import SCHEMES, Form

STEPS = 300
NOISE = 0.3
"""Scale of the noise on zero entries: an unused column of W2 that is exactly zero gets no gradient."""


def fit(form: Form, weight: Tensor, steps: int = STEPS) -> tuple[list[Tensor], float]:
    """The factors, in the form's order, and ||W - compose(factors)|| / ||W||."""
    if type(form.scheme) not in SCHEMES.values():
        raise SchemeError(
            f"factors of {form.scheme!r} cannot be fitted to a weight: expected one of {', '.join(SCHEMES)}. "
            "Pass `init` a function that returns the factors."
        )
    w = weight.detach().float().cpu()
    unit = _rms(w) if form.scheme.nonlinearity is None else 1.0
    w = w / unit
    best = _best(form, w, steps)
    error = _distance(form, w, best) / max(float(w.double().norm()), torch.finfo(w.dtype).tiny)
    return [factor.to(weight) for factor in _rescaled(form, best, unit)], error


def _best(form: Form, w: Tensor, steps: int) -> list[Tensor]:
    truncation, *others = _starts(form, w)
    starts = [_with_noise(form, truncation), *others]
    candidates = [truncation, *(_descend(form, w, start, steps) for start in starts)]
    return min(candidates, key=lambda factors: _distance(form, w, factors))


def truncation_error(form: Form, weight: Tensor) -> float:
    """||W - compose|| / ||W|| of the truncated SVD (HOSVD), the first start of `fit`."""
    w = weight.detach().float().cpu()
    return _distance(form, w, _starts(form, w)[0]) / float(w.norm())


def _rms(w: Tensor) -> float:
    """1 if every entry is 0. Divides by the largest entry first: its square may overflow float32."""
    largest = float(w.abs().max())
    return largest * float((w / largest).square().mean().sqrt()) if largest else 1.0


def _starts(form: Form, w: Tensor) -> list[list[Tensor]]:
    """The factors of each split of w."""
    return [
        [factor for part in parts for factor in _factors(form, part, like=w)]
        for parts in form.scheme.split(w)
    ]


def _factors(form: Form, inner: Tensor | float, like: Tensor) -> list[Tensor]:
    return _truncate(form, inner) if isinstance(inner, Tensor) else _constant(form, like, inner)


def _truncate(form: Form, w: Tensor) -> list[Tensor]:
    """The factors of one inner weight nearest to w: SVD, or HOSVD for a kernel, padded with zeros."""
    r = form.rank
    if form.is_kernel:
        x = _basis(w.flatten(1), r)
        y = _basis(w.transpose(0, 1).flatten(1), r)
        return [x, y, torch.einsum("oa,ib,oi...->ab...", x, y, w)]
    return form.scheme.nearest(w, r)


def _basis(unfolding: Tensor, r: int) -> Tensor:
    return wide(torch.linalg.svd(unfolding, full_matrices=False)[0][:, :r], r)


def _constant(form: Form, like: Tensor, value: float) -> list[Tensor]:
    """The factors of an inner weight that is `value` everywhere: first columns of ones, the rest zero."""
    shapes = list(form.factors.values())[: 3 if form.is_kernel else 2]
    factors = [like.new_zeros(shape) for shape in shapes]
    factors[0][:, 0] = value
    factors[1][:, 0] = 1.0
    if form.is_kernel:
        factors[2][0, 0] = 1.0
    return factors


def _with_noise(form: Form, factors: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = NOISE / form.rank**0.5
    return [
        f + scale * torch.randn(f.shape, generator=generator, device=f.device) * (f == 0) for f in factors
    ]


def _descend(form: Form, w: Tensor, start: Sequence[Tensor], steps: int) -> list[Tensor]:
    size = w.square().sum().clamp_min(1e-30)
    factors = [f.clone(memory_format=torch.contiguous_format).requires_grad_() for f in start]
    optimizer = torch.optim.LBFGS(
        factors, max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = (form.compose(factors) - w).square().sum() / size
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    return [f.detach() for f in factors]


def _rescaled(form: Form, factors: list[Tensor], unit: float) -> list[Tensor]:
    """compose(result) = unit * compose(factors), with private factors unchanged: W2 + 1 does not scale with W2."""
    share = unit ** (1 / (form.scheme.degree * (3 if form.is_kernel else 2)))
    return [f if name in form.private else f * share for name, f in zip(form.factors, factors, strict=True)]


def _distance(form: Form, w: Tensor, factors: Sequence[Tensor]) -> float:
    distance = float((form.compose(factors).double() - w).norm())
    return distance if distance == distance else float("inf")
