"""Jacobian correction (appendix B): steer the stepped factors towards the dense step.

    R = L + lambda/2 ||W' - (W - eta J_W)||,   W' = compose(F - eta J_F),   J_F = (dW/dF)^T J_W

J_W, the loss's gradient at the composed weight, is a constant: it comes out of the one backward pass through
the network, and only the composition is differentiated twice. The printed expansion of W' has a misprint and
is not coded: the stepped factors are composed. A layer's penalty is a norm, as printed, or its square.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vjp

from fedpara.errors import SchemeError
from fedpara.parameterization.convert import compose_state
from fedpara.parameterization.schemes import Form
from fedpara.state import State

Norm = Literal["plain", "squared"]
Loss = Callable[[State], Tensor]


def penalty(
    form: Form, factors: tuple[Tensor, ...], j_w: Tensor, eta: float | Tensor, norm: Norm = "plain"
) -> Tensor:
    """1/2 ||W' - (W - eta J_W)|| (or its square) of one layer, a function of its factors."""
    w, pull = vjp(lambda *f: form.compose(f), *factors)  # type: ignore[misc]
    stepped = form.compose([f - eta * j for f, j in zip(factors, pull(j_w), strict=True)])
    squared = (stepped - (w - eta * j_w)).square().sum()
    return squared / 2 if norm == "squared" else _sqrt(squared) / 2


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

    `loss` is a function of the plain model's state (composed weights). One forward and one backward pass
    through it, whatever lambda; with lambda 0 this is the ordinary gradient.
    """
    if norm not in ("plain", "squared"):
        raise SchemeError(f"norm must be 'plain' or 'squared': got {norm!r}.")
    plain, pull = vjp(lambda s: compose_state(s, forms), dict(state))  # type: ignore[misc]
    j_plain, value = torch.func.grad_and_value(loss)(plain)
    gradient: State = pull(j_plain)[0]
    if lambda_ == 0:
        return gradient, value
    for weight, form in forms.items():
        names = [f"{weight}.{factor}" for factor in form.factors]
        factors = tuple(state[name] for name in names)
        j_w = j_plain[weight]
        correction = grad(lambda f, form=form, j_w=j_w: penalty(form, f, j_w, eta, norm))(factors)
        for name, c in zip(names, correction, strict=True):
            gradient[name] = gradient[name] + lambda_ * c
    return gradient, value


def _sqrt(squared: Tensor) -> Tensor:
    """sqrt with gradient 0 at 0, where a layer's factors already step as the dense weight would."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
