"""FedNTD (Lee et al., 2022): clients keep what the server's model says about the classes other than the true one.

    loss = cross entropy + beta tau^2 KL(q~_g || q~)

q~ is the softmax of the logits divided by tau, over all classes but the true one; q~_g is that of the model that the
client received. On skewed data a client's model otherwise forgets the classes that the client lacks.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpara.algorithms.core import Algorithm
from fedpara.algorithms.fedavg import fedavg
from fedpara.algorithms.local import NOT_NEGATIVE, POSITIVE, Local, check

NEVER = -1e9
"""A logit whose probability is zero."""


def fedntd(beta: float = 1.0, tau: float = 1.0, *, local: Local | None = None, **fields: Any) -> Algorithm:
    """FedNTD, for logits [N, classes] and classes [N]. The other keywords are fields of Local."""
    check(NOT_NEGATIVE, beta=beta)
    check(POSITIVE, tau=tau)
    return replace(
        fedavg(local=local, **fields), name="fedntd", distill=partial(not_true, beta=beta, tau=tau)
    )


def not_true(output: Tensor, target: Tensor, received: Tensor, *, beta: float, tau: float) -> Tensor:
    """beta tau^2 KL(q~_g || q~) per example"""
    true = torch.arange(output.shape[1], device=output.device) == target[:, None]
    student, teacher = (
        (logits / tau).masked_fill(true, NEVER).log_softmax(1) for logits in (output, received)
    )
    return beta * tau**2 * (teacher.exp() * (teacher - student)).sum(1)
