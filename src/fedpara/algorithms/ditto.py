"""Ditto (Li et al., 2021, Alg. 1): FedAvg, and a personal model v_i per client that stays near the server's.

    client    y_i as in FedAvg
              v_i -= eta (grad L(v_i) + lambda (v_i - x))
    server    x = sum_i n_i y_i / sum_i n_i

x is the model that the client received. v_i stays with the client, and personal scores are those of v_i. A message is
FedAvg's. lambda = 0 is local training; a large lambda keeps v_i at x, and needs eta lambda < 2.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from fedpara.algorithms.core import Algorithm, Personal
from fedpara.algorithms.fedavg import fedavg, proximal
from fedpara.algorithms.local import NOT_NEGATIVE, Local, Rule, check

WHOLE: Rule = ("a whole number of 1 or more", lambda value: value >= 1 and value == int(value))
"""A config holds every option as a float."""


def ditto(
    lambda_: float = 0.1,
    personal_lr: float | None = None,
    personal_steps: float | None = None,
    *,
    local: Local | None = None,
    **fields: Any,
) -> Algorithm:
    """Ditto. `personal_lr` and `personal_steps` are those of v_i, by default FedAvg's. The rest are fields of Local."""
    check(NOT_NEGATIVE, lambda_=lambda_)
    base = fedavg(local=local, **fields)
    own = base.local if personal_lr is None else replace(base.local, lr=personal_lr)
    if personal_steps is not None:
        check(WHOLE, personal_steps=personal_steps)
        own = replace(own, epochs=None, steps=int(personal_steps))
    return replace(base, name="ditto", personal=Personal(partial(proximal, mu=lambda_), own))
