"""How factors start when there is no trained weight to start from.

    fan_out      X, Y ~ N(0, 2/r), T ~ N(0, 2/(k r)): known to learn for FedPara
    calibrated   scaled so that the composed weight has He's deviation sqrt(2 / fan_in)

An initialiser is a function of a `Form` and a generator that returns the factors in the form's order;
a user's own function of that signature goes wherever these do.
"""

from collections.abc import Callable, Sequence
from math import prod, sqrt

import torch
from torch import Generator, Tensor

from fedpara.errors import SchemeError
from fedpara.parameterization.compose import NONLINEARITIES
from fedpara.parameterization.schemes import Form

Init = Callable[[Form, Generator | None], Sequence[Tensor]]

PRIVATE_SCALE = 1.0
"""Deviation of pFedPara's private W2. Near 0 the model is FedAvg's with a slow residue, from 3 it diverges."""


def fan_out(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """std sqrt(2/r) for X and Y, sqrt(2/(k r)) for T: He's rule with each factor's own fan-out."""
    return [
        torch.randn(shape, generator=generator) * sqrt(2 / (form.rank * prod(shape[2:])))
        for shape in form.factors.values()
    ]


def calibrated(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """rms(W) = sqrt(2 / fan_in), for any scheme, rank and nonlinearity.

    FedPara gives both inner weights the same share; pFedPara's W2 starts at PRIVATE_SCALE and W1
    carries the rest. Each factor of an inner weight takes the same part of its scale.
    """
    factors = [torch.randn(shape, generator=generator) for shape in form.factors.values()]
    inner = form.inner(factors)
    s = NONLINEARITIES[form.scheme.nonlinearity]
    he = sqrt(2 / prod(form.shape[1:]))
    if form.scheme.private:
        second = PRIVATE_SCALE / _rms(inner[1])
        scales = [_scale_to(inner[0], he / _rms(s(second * inner[1]) + 1), s), second]
    else:
        scales = [_scale_to(w, he ** (1 / len(inner)), s) for w in inner]
    each = len(factors) // len(inner)
    return [factor * scales[i // each] ** (1 / each) for i, factor in enumerate(factors)]


def _scale_to(w: Tensor, target: float, s: Callable[[Tensor], Tensor]) -> float:
    """The a > 0 with rms(s(a w)) = target; tanh cannot pass 1, so no more than 0.95 is asked of it."""
    a = target / _rms(w)
    if s is not torch.tanh:
        return a
    target, low, high = min(target, 0.95), a, a
    while _rms(s(high * w)) < target:
        high *= 2
    for _ in range(30):
        a = (low + high) / 2
        low, high = (a, high) if _rms(s(a * w)) < target else (low, a)
    return a


def _rms(w: Tensor) -> float:
    return float(w.square().mean().sqrt())


INITS: dict[str, Init] = {"fan_out": fan_out, "calibrated": calibrated}
DEFAULTS: dict[str, Init] = {"fedpara": fan_out, "pfedpara": calibrated, "lowrank": calibrated}


def default(form: Form, generator: Generator | None = None) -> Sequence[Tensor]:
    """Each scheme's own start: fan_out for FedPara, calibrated for pFedPara and LowRank."""
    return DEFAULTS[form.scheme.name](form, generator)


def checked(init: Init, form: Form, generator: Generator | None) -> list[Tensor]:
    """What `init` returned, if it fits the form."""
    factors = list(init(form, generator))
    expected = [tuple(shape) for shape in form.factors.values()]
    got = [tuple(factor.shape) for factor in factors]
    if got != expected:
        raise SchemeError(
            f"the initialiser {getattr(init, '__name__', init)!r} returned factors of shapes {got}: "
            f"expected {dict(form.factors)}, in that order."
        )
    return factors
