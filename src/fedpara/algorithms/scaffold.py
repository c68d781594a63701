"""SCAFFOLD, option II (Karimireddy et al., 2020, Alg. 1).

    step      y -= eta (g - c_i + c)
    client    c_i+ = c_i - c + (x - y_i) / (K eta)
    server    x += eta_g mean(y_i - x);   c += |S|/N mean(c_i+ - c_i)

c travels down and c_i+ - c_i up: twice the bytes of FedAvg.
The means are uniform over the cohort, as published, whatever the clients' numbers of examples: only so is c
the mean of all c_i, and the corrections sum to zero over the clients. A narrow uplink rounds what the server adds,
not what the client keeps: c then strays from that mean by the link's rounding.
"""

from functools import partial
from typing import Any

from fedpara.algorithms.core import (
    POSITIVE,
    Algorithm,
    FromMean,
    Local,
    Mean,
    Variables,
    check,
    group,
    local_of,
)
from fedpara.algorithms.elementwise import elementwise
from fedpara.errors import ConfigError, StateError
from fedpara.state import State, add, subtract, zeros_like

CONTROL = "control"


def scaffold(server_lr: float = 1.0, *, local: Local | None = None, **fields: Any) -> Algorithm:
    """SCAFFOLD with eta_g = server_lr. The other keywords are Local's fields."""
    check(POSITIVE, server_lr=server_lr)
    local = local_of(local, fields)
    if local.momentum:
        raise ConfigError(
            f"scaffold with momentum {local.momentum}: expected 0, for (x - y) / (K eta) is the mean gradient of plain "
            "steps only. Leave momentum out, or choose another algorithm."
        )
    return Algorithm(
        name="scaffold",
        local=local,
        server_init=_zero_control,
        broadcast=_control,
        client_init=_zero_control,
        correct=_correct,
        finish=_finish,
        aggregate=FromMean(partial(_step, eta_g=server_lr), weights="uniform"),
    )


def _zero_control(x: State) -> Variables:
    return {CONTROL: zeros_like(x)}


def _control(server: Variables) -> Variables:
    return {CONTROL: group(server, CONTROL)}


def _correct(gradient: State, y: State, x: State, down: Variables, client: Variables) -> State:
    return add(subtract(gradient, group(client, CONTROL)), group(down, CONTROL))


@elementwise
def _finish(
    x: State, y: State, down: Variables, client: Variables, steps: int, eta: float
) -> tuple[Variables, Variables]:
    if steps < 1 or not eta > 0:
        raise StateError(
            f"SCAFFOLD's control variate after {steps} steps at learning rate {eta}: expected both above 0. "
            "Leave out clients without examples; with a decaying learning rate, run fewer rounds."
        )
    c, c_i = group(down, CONTROL), group(client, CONTROL)
    g = {name: change / (steps * eta) for name, change in subtract(x, y).items()}
    c_i_plus = add(subtract(c_i, c), g)
    return {CONTROL: subtract(c_i_plus, c_i)}, {CONTROL: c_i_plus}


def _step(x: State, server: Variables, mean: Mean, clients: int, *, eta_g: float) -> tuple[State, Variables]:
    d, dc = subtract(mean.y, x), group(mean.extra, CONTROL)
    return add(x, d, eta_g), {CONTROL: add(group(server, CONTROL), dc, mean.count / clients)}
