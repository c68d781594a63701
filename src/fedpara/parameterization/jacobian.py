"""Jacobian correction (appendix B): a penalty that pulls the stepped factors towards the dense step.

    R = L + lambda/2 ||W' - (W - eta J_W)||,   W' = compose(F - eta J_F),   J_F = (dW/dF)^T J_W

J_W is the gradient of the loss at the composed weight. It counts as a constant: one backward pass through the
network gives it, and only the composition is differentiated twice. The paper's expansion of W' has a misprint,
so W' is composed from the stepped factors. The paper does not say over what the norm is taken:

    plain     the sum over layers of each layer's norm
    squared   the sum of its square
    network   one norm over all layers: sqrt(sum of the squares)
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vjp

from fedpara.parameterization.convert import compose_state
from fedpara.parameterization.schemes import Form
from fedpara.state import State

Norm = Literal["plain", "squared", "network"]
Loss = Callable[[State], Tensor]


def penalty(
    form: Form, factors: tuple[Tensor, ...], j_w: Tensor, eta: float | Tensor, norm: Norm = "plain"
) -> Tensor:
    """1/2 ||W' - (W - eta J_W)||, or its square unless `plain`, of one layer, as a function of its factors."""
    form = replace(form, base=None)  # an adapter's W0 cancels
    w, pull = vjp(lambda *f: form.compose(f), *factors)  # type: ignore[misc]
    stepped = form.compose([f - eta * j for f, j in zip(factors, pull(j_w), strict=True)])
    squared = (stepped - (w - eta * j_w)).square().sum()
    return _sqrt(squared) / 2 if norm == "plain" else squared / 2


def corrected_grad(
    loss: Loss,
    state: Mapping[str, Tensor],
    forms: Mapping[str, Form],
    *,
    eta: float | Tensor,
    lambda_: float = 1.0,
    norm: Norm = "plain",
) -> tuple[State, Tensor]:
    """The gradient of L + lambda * penalty at `state`, and L.

    `loss` is a function of the plain model's state (composed weights). It runs one forward and one backward pass
    for any lambda. Lambda 0 gives the ordinary gradient.
    """
    plain, pull = vjp(lambda s: compose_state(s, forms), dict(state))  # type: ignore[misc]
    j_plain, value = grad_and_value(loss)(plain)
    gradient: State = pull(j_plain)[0]
    if lambda_ == 0:
        return gradient, value
    corrections: State = {}
    penalties = []
    for weight, form in forms.items():
        names = [f"{weight}.{factor}" for factor in form.factors]
        factors, j_w = tuple(state[name] for name in names), j_plain[weight]
        correction, one = grad_and_value(lambda f, form=form, j_w=j_w: penalty(form, f, j_w, eta, norm))(
            factors
        )
        corrections |= zip(names, correction, strict=True)
        penalties.append(one)
    scale: float | Tensor = lambda_
    if (
        norm == "network" and penalties
    ):  # d sqrt(2 P) / 2 = dP / (2 sqrt(2 P)), where P sums the squared penalties
        scale = lambda_ * grad(lambda p: _sqrt(2 * p) / 2)(torch.stack(penalties).sum())
    for name, correction in corrections.items():
        gradient[name] = gradient[name] + scale * correction
    return gradient, value


def _sqrt(squared: Tensor) -> Tensor:
    """sqrt with gradient 0 at 0, where the factors already follow the dense step."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
