"""Attacks that know every honest update of a round. mu and sigma are their mean and standard deviation.

    alie(z)        mu - z sigma, coordinate by coordinate    "A little is enough" (Baruch et al., 2019)
    ipm(epsilon)   x - epsilon (mu - x)                      inner-product manipulation (Xie et al., 2020)

No real client knows the others' updates, so these are worst cases for simulations.
"""

from collections.abc import Sequence
from functools import partial
from statistics import NormalDist

import torch

from fedpara.algorithms.local import POSITIVE, check
from fedpara.attacks.core import Attack
from fedpara.state import State, add, mean, subtract


def alie(z: float | None = None) -> Attack:
    """Stays within the honest spread. By default z is the largest value that a majority seems to support."""
    check(POSITIVE, z=1.0 if z is None else z)
    return Attack("alie", collude=partial(_alie, z=z))


def ipm(epsilon: float = 0.5) -> Attack:
    """Points against the honest mean. With a small epsilon the update is shorter than honest ones."""
    check(POSITIVE, epsilon=epsilon)
    return Attack("ipm", collude=partial(_ipm, epsilon=epsilon))


def supported_z(hostile: int, clients: int) -> float:
    """z = Phi^-1((n - m - s) / (n - m)) with s = floor(n / 2 + 1) - m: s honest clients are farther out."""
    honest = clients - hostile
    s = clients // 2 + 1 - hostile
    return NormalDist().inv_cdf(min(max((honest - s) / honest, 0.5), 0.999))


def _alie(honest: Sequence[State], x: State, hostile: int, clients: int, *, z: float | None) -> State:
    z = supported_z(hostile, clients) if z is None else z
    sent = {}
    for name in x:
        stacked = torch.stack([y[name] for y in honest])
        sent[name] = stacked.mean(0) - z * stacked.std(0, correction=0)
    return sent


def _ipm(honest: Sequence[State], x: State, hostile: int, clients: int, *, epsilon: float) -> State:
    return add(x, subtract(mean(honest, [1.0] * len(honest)), x), -epsilon)
