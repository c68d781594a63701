"""SCAFFOLD, option II (Karimireddy et al., 2020, Alg. 1).

    step      y -= eta (g - c_i + c)
    client    c_i+ = c_i - c + (x - y_i) / (K eta)
    server    x += eta_g mean(y_i - x);   c += |S|/N mean(c_i+ - c_i)

The server sends c, a client sends c_i+ - c_i: twice the bytes of FedAvg.
The means over the cohort are uniform, as published. Only uniform means keep c equal to the mean of all c_i, and the
sum of the corrections over the clients at zero. A narrow uplink rounds what the server adds, not what the client keeps:
c then differs from that mean by the rounding of the link.
"""

from functools import partial
from typing import Any

from fedpara.algorithms.core import Algorithm, FromMean, Mean, Variables, on_any_device, variable
from fedpara.algorithms.elementwise import elementwise
from fedpara.algorithms.local import POSITIVE, Local, check, expect_sgd, with_fields
from fedpara.errors import ConfigError
from fedpara.state import State, add, subtract, zeros_like

CONTROL = "control"


def scaffold(server_lr: float = 1.0, *, local: Local | None = None, **fields: Any) -> Algorithm:
    """SCAFFOLD with eta_g = server_lr. The other keywords are fields of Local."""
    check(POSITIVE, server_lr=server_lr)
    local = with_fields(local, fields)
    expect_sgd("scaffold", local)
    if local.momentum:
        # (x - y) / (K eta) is the mean gradient of plain SGD steps only.
        raise ConfigError(
            f"scaffold with momentum {local.momentum}: expected 0. Or choose another algorithm."
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
    return {CONTROL: variable(server, CONTROL)}


def _correct(gradient: State, y: State, x: State, down: Variables, client: Variables) -> State:
    return add(subtract(gradient, variable(client, CONTROL)), variable(down, CONTROL))


@on_any_device
@elementwise
def _finish(
    x: State, y: State, down: Variables, client: Variables, steps: int, eta: float
) -> tuple[Variables, Variables]:
    c, c_i = variable(down, CONTROL), variable(client, CONTROL)
    g = {name: change / (steps * eta) for name, change in subtract(x, y).items()}
    c_i_plus = add(subtract(c_i, c), g)
    return {CONTROL: subtract(c_i_plus, c_i)}, {CONTROL: c_i_plus}


@on_any_device
def _step(x: State, server: Variables, mean: Mean, clients: int, *, eta_g: float) -> tuple[State, Variables]:
    d, dc = subtract(mean.y, x), variable(mean.extra, CONTROL)
    return add(x, d, eta_g), {CONTROL: add(variable(server, CONTROL), dc, mean.count / clients)}
