"""FedDyn (Acar et al., 2021, Alg. 1).

    step      g - h_i + alpha (y - x)
    client    h_i -= alpha (y_i - x)
    server    h -= alpha/N sum_S (y_i - x);   x = mean(y_i) - h / alpha

Only the model is sent: each h_i stays with its client, h with the server.
The mean over the cohort is uniform, as published. Only a uniform mean keeps h equal to the mean of all h_i.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from fedpara.algorithms.core import Algorithm, FromMean, Mean, Variables, on_any_device, variable
from fedpara.algorithms.elementwise import elementwise
from fedpara.algorithms.fedavg import fedavg
from fedpara.algorithms.local import POSITIVE, Local, check
from fedpara.state import State, add, subtract, zeros_like

H = "h"


def feddyn(alpha: float = 0.1, *, local: Local | None = None, **fields: Any) -> Algorithm:
    """FedDyn. The other keywords are fields of Local."""
    check(POSITIVE, alpha=alpha)
    return replace(
        fedavg(local=local, **fields),
        name="feddyn",
        server_init=_zero_h,
        client_init=_zero_h,
        correct=partial(_correct, alpha=alpha),
        finish=partial(_finish, alpha=alpha),
        aggregate=FromMean(partial(_step, alpha=alpha), weights="uniform"),
    )


def _zero_h(x: State) -> Variables:
    return {H: zeros_like(x)}


def _correct(
    gradient: State, y: State, x: State, down: Variables, client: Variables, *, alpha: float
) -> State:
    return add(subtract(gradient, variable(client, H)), subtract(y, x), alpha)


@on_any_device
@elementwise
def _finish(
    x: State, y: State, down: Variables, client: Variables, steps: int, eta: float, *, alpha: float
) -> tuple[Variables, Variables]:
    return {}, {H: add(variable(client, H), subtract(y, x), -alpha)}


@on_any_device
def _step(x: State, server: Variables, mean: Mean, clients: int, *, alpha: float) -> tuple[State, Variables]:
    h = add(variable(server, H), subtract(mean.y, x), -alpha * mean.count / clients)
    return add(mean.y, h, -1 / alpha), {H: h}
