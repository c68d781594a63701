"""FedNova (Wang et al., 2020): a client with more local steps no longer moves the model further.

    client    d_i = (x - y_i) / a_i,   sent as x - d_i, beside a_i
    server    x -= tau sum_i p_i d_i,   tau = sum_i p_i a_i,   p_i = n_i / sum_j n_j

a_i is the length of a client's path, in gradients: K with plain SGD, and with momentum rho

    a_i = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho)

With equal numbers of steps this is FedAvg.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedpara.algorithms.core import Algorithm, FromMean, Mean, Variables, Visit, on_any_device, variable
from fedpara.algorithms.fedavg import fedavg
from fedpara.algorithms.local import Local, expect_sgd
from fedpara.state import State, add, device_of, subtract

PATH, LENGTH = "path", "length"


def fednova(*, local: Local | None = None, **fields: Any) -> Algorithm:
    """FedNova. The other keywords are fields of Local."""
    base = fedavg(local=local, **fields)
    expect_sgd("fednova", base.local)
    rho = base.local.momentum
    return replace(
        base,
        name="fednova",
        send=partial(_normalised, rho=rho),
        finish=partial(_finish, rho=rho),
        aggregate=FromMean(_step),
    )


def path_length(steps: int, rho: float) -> float:
    """a_i of a client that made `steps` steps with momentum `rho`."""
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


@on_any_device
def _normalised(x: State, y: State, visit: Visit, *, rho: float) -> State:
    return add(x, subtract(y, x), 1 / path_length(visit.steps, rho))


@on_any_device
def _finish(
    x: State, y: State, down: Variables, client: Variables, steps: int, eta: float, *, rho: float
) -> tuple[Variables, Variables]:
    # float64: a mean of float32 would round it.
    length = torch.tensor(path_length(steps, rho), dtype=torch.float64, device=device_of([x]))
    return {PATH: {LENGTH: length}} if x else {}, {}


@on_any_device
def _step(x: State, server: Variables, mean: Mean, clients: int) -> tuple[State, Variables]:
    tau = float(variable(mean.extra, PATH).get(LENGTH, 0.0))
    return add(x, subtract(mean.y, x), tau), {}
