"""FedDyn (Acar et al., 2021, Alg. 1).

    step      g - h_i + alpha (y - x)
    client    h_i -= alpha (y_i - x)
    server    h -= alpha/N sum_S (y_i - x);   x = mean(y_i) - h / alpha

Nothing travels but the model: the h_i stay with the clients, h with the server.
The mean is uniform over the cohort, as published, whatever the clients' numbers of examples: only so is h
the mean of all h_i.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from fedpara.algorithms.core import POSITIVE, Algorithm, FromMean, Groups, Local, Mean, check, group
from fedpara.algorithms.elementwise import elementwise
from fedpara.algorithms.fedavg import fedavg
from fedpara.state import State, add, subtract, zeros_like

H = "h"


def feddyn(alpha: float = 0.1, *, local: Local | None = None, **fields: Any) -> Algorithm:
    """FedDyn. The other keywords are Local's fields."""
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


def _zero_h(x: State) -> Groups:
    return {H: zeros_like(x)}


def _correct(gradient: State, y: State, x: State, down: Groups, client: Groups, *, alpha: float) -> State:
    return add(subtract(gradient, group(client, H)), subtract(y, x), alpha)


@elementwise
def _finish(
    x: State, y: State, down: Groups, client: Groups, steps: int, eta: float, *, alpha: float
) -> tuple[Groups, Groups]:
    return {}, {H: add(group(client, H), subtract(y, x), -alpha)}


def _step(x: State, server: Groups, mean: Mean, clients: int, *, alpha: float) -> tuple[State, Groups]:
    h = add(group(server, H), subtract(mean.y, x), -alpha * mean.count / clients)
    return add(mean.y, h, -1 / alpha), {H: h}
