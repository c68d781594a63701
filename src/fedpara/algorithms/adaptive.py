"""FedAdam, FedYogi and FedAdagrad (Reddi et al., 2021, Alg. 2): FedAvg's clients, an adaptive server.

    d = mean(y_i - x);   m = b1 m + (1 - b1) d;   x += eta_g m / (sqrt(v) + tau)

    FedAdagrad   v = v + d^2
    FedYogi      v = v - (1 - b2) d^2 sign(v - d^2)
    FedAdam      v = b2 v + (1 - b2) d^2

m starts at 0 and v at tau^2, the smallest value that Alg. 2 allows. There is no bias correction.
The mean is weighted by the clients' numbers of examples, as in FedAvg.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpara.algorithms.core import Algorithm, FromMean, Mean, Variables, on_any_device, variable
from fedpara.algorithms.fedavg import fedavg
from fedpara.algorithms.local import BELOW_ONE, POSITIVE, Local, check
from fedpara.state import State, add, scale, subtract, zeros_like

Rule = Callable[[Tensor, Tensor], Tensor]
"""(v, d^2) -> the new v"""


def fedadam(
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    *,
    local: Local | None = None,
    **fields: Any,
) -> Algorithm:
    """FedAdam with eta_g = server_lr. The other keywords are fields of Local."""
    check(BELOW_ONE, beta2=beta2)
    return _adaptive(
        "fedadam", partial(_adam, b2=beta2), server_lr, beta1, tau, fedavg(local=local, **fields)
    )


def fedyogi(
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    *,
    local: Local | None = None,
    **fields: Any,
) -> Algorithm:
    """FedYogi with eta_g = server_lr. The other keywords are fields of Local."""
    check(BELOW_ONE, beta2=beta2)
    return _adaptive(
        "fedyogi", partial(_yogi, b2=beta2), server_lr, beta1, tau, fedavg(local=local, **fields)
    )


def fedadagrad(
    server_lr: float = 0.01,
    beta1: float = 0.0,
    tau: float = 1e-3,
    *,
    local: Local | None = None,
    **fields: Any,
) -> Algorithm:
    """FedAdagrad with eta_g = server_lr. The other keywords are fields of Local.

    v needs no beta2, and beta1 is 0 as published: no momentum.
    """
    return _adaptive("fedadagrad", operator.add, server_lr, beta1, tau, fedavg(local=local, **fields))


def _adaptive(
    name: str, rule: Rule, server_lr: float, beta1: float, tau: float, base: Algorithm
) -> Algorithm:
    check(POSITIVE, server_lr=server_lr, tau=tau)
    check(BELOW_ONE, beta1=beta1)
    return replace(
        base,
        name=name,
        server_init=partial(_moments, tau=tau),
        aggregate=FromMean(partial(_step, rule=rule, eta_g=server_lr, b1=beta1, tau=tau)),
    )


def _adam(v: Tensor, d2: Tensor, *, b2: float) -> Tensor:
    return b2 * v + (1 - b2) * d2


def _yogi(v: Tensor, d2: Tensor, *, b2: float) -> Tensor:
    return v - (1 - b2) * d2 * torch.sign(v - d2)


def _moments(x: State, *, tau: float) -> Variables:
    return {"m": zeros_like(x), "v": {name: torch.full_like(tensor, tau**2) for name, tensor in x.items()}}


@on_any_device
def _step(
    x: State, server: Variables, mean: Mean, clients: int, *, rule: Rule, eta_g: float, b1: float, tau: float
) -> tuple[State, Variables]:
    d = subtract(mean.y, x)
    m = add(scale(variable(server, "m"), b1), d, 1 - b1)
    v = {name: rule(variable(server, "v")[name], d[name].square()) for name in d}
    step = {name: m[name] / (v[name].sqrt() + tau) for name in m}
    return add(x, step, eta_g), {"m": m, "v": v}
