"""FedAvg (McMahan et al., 2017) and FedProx (Li et al., 2020).

    FedAvg    x = sum_i n_i y_i / sum_i n_i
    FedProx   the same, with g + mu (y - x) in each step

n_i is the number of examples of client i.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from fedpara.algorithms.core import Algorithm, FromMean, Mean, Variables, no_variables, on_any_device
from fedpara.algorithms.local import NOT_NEGATIVE, Local, check, with_fields
from fedpara.state import State, add, subtract


def fedavg(*, local: Local | None = None, **fields: Any) -> Algorithm:
    """FedAvg. The other keywords are fields of Local."""
    return Algorithm(
        name="fedavg",
        local=with_fields(local, fields),
        server_init=_nothing,
        broadcast=_nothing,
        client_init=_nothing,
        correct=_as_is,
        finish=no_variables,
        aggregate=FromMean(_take_mean),
    )


def fedprox(mu: float = 0.1, *, local: Local | None = None, **fields: Any) -> Algorithm:
    """FedAvg with the penalty mu/2 ||y - x||^2 on each client. The other keywords are fields of Local."""
    check(NOT_NEGATIVE, mu=mu)
    return replace(fedavg(local=local, **fields), name="fedprox", correct=partial(proximal, mu=mu))


def takes_mean(algorithm: Algorithm) -> bool:
    """Whether the server's next model is the mean of the updates, as in FedAvg and FedProx."""
    aggregate = algorithm.aggregate
    return isinstance(aggregate, FromMean) and aggregate.step is _take_mean


def _nothing(_: object) -> Variables:
    return {}


def _as_is(gradient: State, y: State, x: State, down: Variables, client: Variables) -> State:
    return gradient


def proximal(gradient: State, y: State, x: State, down: Variables, client: Variables, *, mu: float) -> State:
    """g + mu (y - x)"""
    return add(gradient, subtract(y, x), mu)


@on_any_device
def _take_mean(x: State, server: Variables, mean: Mean, clients: int) -> tuple[State, Variables]:
    return mean.y, {}
