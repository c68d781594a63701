"""Local optimizers as pure steps: slots = init(y);   y, slots = step(y, g, slots, lr).

    sgd      g += wd y;  v = m v + g;  y -= lr v
    adam     g += wd y;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
             y -= lr (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps)
    adamw    as adam, with y -= lr wd y in place of g += wd y

The same formulas as torch.optim. `slots` is a dict of states, such as {"m": m, "v": v}. A step uses tensor operations
only, so that every engine can stack and compile it. lr = 0 leaves y as it is: a lane without a client waits that way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedpara.algorithms.in_place import adam_in_place, sgd_in_place
from fedpara.errors import ConfigError, among
from fedpara.state import State, add, zeros_like

if TYPE_CHECKING:
    from fedpara.algorithms.local import Local

Slots = dict[str, State]
Rate = float | Tensor


@dataclass(frozen=True)
class Optimizer:
    """A local optimizer. `name` is shown in reports; `init` gets the parameters, `step` (y, gradient, slots, lr)."""

    name: str
    init: Callable[[State], Slots]
    step: Callable[[State, State, Slots, Rate], tuple[State, Slots]]
    in_place: Callable[[State, State, Slots, Rate], None] | None = (
        None  # the same step, writing to y and slots
    )


def sgd(*, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    def step(y: State, g: State, slots: Slots, lr: Rate) -> tuple[State, Slots]:
        if weight_decay:
            g = add(g, y, weight_decay)
        if momentum:
            v = slots["velocity"]
            g = {name: momentum * v[name] + tensor for name, tensor in g.items()}
        return move(y, g, lr), {"velocity": g} if momentum else {}

    def init(y: State) -> Slots:
        return {"velocity": zeros_like(y)} if momentum else {}

    in_place = partial(sgd_in_place, momentum=momentum, weight_decay=weight_decay)
    return Optimizer("sgd", init, step, in_place)


def adam(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    options: dict[str, Any] = {"betas": betas, "eps": eps, "l2": weight_decay}
    return Optimizer("adam", _moments, partial(_adam_step, **options), partial(adam_in_place, **options))


def adamw(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer:
    options: dict[str, Any] = {"betas": betas, "eps": eps, "decay": weight_decay}
    return Optimizer("adamw", _moments, partial(_adam_step, **options), partial(adam_in_place, **options))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adam": adam, "adamw": adamw}


def build_optimizer(local: "Local") -> Optimizer:
    """The optimizer that `local` describes."""
    if isinstance(local.optimizer, Optimizer):
        return local.optimizer
    if local.optimizer == "sgd":
        return sgd(momentum=local.momentum, weight_decay=local.weight_decay)
    if local.optimizer in OPTIMIZERS:
        return OPTIMIZERS[local.optimizer](betas=local.betas, eps=local.eps, weight_decay=local.weight_decay)
    raise ConfigError(f"unknown optimizer {local.optimizer!r}: {among(str(local.optimizer), OPTIMIZERS)}")


def move(y: State, direction: State, lr: Rate) -> State:
    """y - lr direction"""
    if isinstance(lr, Tensor):
        return {name: torch.addcmul(tensor, direction[name], lr, value=-1) for name, tensor in y.items()}
    return add(y, direction, -lr)


def _moments(y: State) -> Slots:
    device = next((tensor.device for tensor in y.values()), None)
    # 1 - b2^k in float32 would have a relative error of 6e-5 at k = 1.
    count = torch.zeros((), dtype=torch.float64, device=device)
    return {"m": zeros_like(y), "v": zeros_like(y), "count": {"k": count}}


def _adam_step(
    y: State,
    g: State,
    slots: Slots,
    lr: Rate,
    *,
    betas: tuple[float, float],
    eps: float,
    l2: float = 0.0,
    decay: float = 0.0,
) -> tuple[State, Slots]:
    b1, b2 = betas
    if l2:
        g = add(g, y, l2)
    k = slots["count"]["k"] + 1
    correction_1, correction_2 = 1 - b1**k, (1 - b2**k).sqrt()
    m = {name: b1 * slots["m"][name] + (1 - b1) * tensor for name, tensor in g.items()}
    v = {name: b2 * slots["v"][name] + (1 - b2) * tensor * tensor for name, tensor in g.items()}
    direction = {}
    for name, tensor in y.items():
        c1, c2 = correction_1.to(tensor.dtype), correction_2.to(tensor.dtype)
        direction[name] = (m[name] / c1) / (v[name].sqrt() / c2 + eps)
        if decay:
            direction[name] = direction[name] + decay * tensor
    return move(y, direction, lr), {"m": m, "v": v, "count": {"k": k}}
