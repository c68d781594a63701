"""Attacks on what a client sends. d = y - x is its honest update.

    sign-flip(scale)   x - scale d
    scaling(scale)     x + scale d
    noise(scale)       x + scale ||d|| z / ||z||,  z normal
    gauge(scale)       factors (c X, Y / c): the same weights, c drawn per column between 1 / scale and scale

They need no knowledge beyond x and d.
"""

from functools import partial

import torch

from fedpara.algorithms import Visit
from fedpara.algorithms.local import POSITIVE, check
from fedpara.attacks.core import Attack, Forms
from fedpara.state import State, add, norm, subtract


def sign_flip(scale: float = 1.0) -> Attack:
    """Pushes the model away from where the client's data would take it."""
    check(POSITIVE, scale=scale)
    return Attack("sign-flip", send=partial(_scaled, scale=-scale))


def scaling(scale: float = 100.0) -> Attack:
    """Sends its honest update many times over."""
    check(POSITIVE, scale=scale)
    return Attack("scaling", send=partial(_scaled, scale=scale))


def noise(scale: float = 1.0) -> Attack:
    """Sends a random direction, `scale` times as long as its honest update."""
    check(POSITIVE, scale=scale)
    return Attack("noise", send=partial(_noise, scale=scale))


def gauge(scale: float = 1000.0) -> Attack:
    """Rescales its factors and leaves its weights as they are. A mean of factors breaks; composed weights do not.

    A model without factorized weights is not affected.
    """
    check(POSITIVE, scale=scale)
    return Attack("gauge", send=partial(_gauge, scale=scale))


def _scaled(x: State, y: State, visit: Visit, forms: Forms, *, scale: float) -> State:
    return add(x, subtract(y, x), scale)


def _noise(x: State, y: State, visit: Visit, forms: Forms, *, scale: float) -> State:
    generator = visit.generator()
    z = {name: torch.randn(t.shape, generator=generator).to(t) for name, t in x.items()}
    return add(x, z, scale * norm(subtract(y, x)) / norm(z))


def _gauge(x: State, y: State, visit: Visit, forms: Forms, *, scale: float) -> State:
    generator, sent = visit.generator(), dict(y)
    for weight, form in forms.items():
        for suffix in form.scheme.suffixes:
            left, right = f"{weight}.x{suffix}", f"{weight}.y{suffix}"
            core = f"{weight}.t{suffix}"  # a kernel's factors meet in its core, not in each other
            if left in y and (core in y if form.is_kernel else right in y):
                c = scale ** (2 * torch.rand(form.rank, generator=generator) - 1)
                sent[left] = y[left] * c.to(y[left])
                if form.is_kernel:
                    sent[core] = y[core] / c.to(y[core]).view(-1, *[1] * (y[core].dim() - 1))
                else:
                    sent[right] = y[right] / c.to(y[right])
    return sent
