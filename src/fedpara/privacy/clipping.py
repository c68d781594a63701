"""Bounds one client's influence: the norm of its update, and how that bound follows the clients.

    clip       d min(1, C / ||d||), over all tensors at once
    adaptive   C <- C exp(-eta_C (b - gamma)), b = (sum_i (b_i - 1/2) + N(0, s^2)) / m + 1/2      Andrew et al., 2021

b_i is 1 if client i's update is shorter than C, and m is the expected number of clients. So C moves to the quantile
gamma of the clients' norms. A bit changes their sum by 1/2, so the bits cost as much as a Gaussian mechanism of noise
multiplier 2 s. Bits and updates together cost as much as the multiplier z alone, if the updates get the slightly larger
multiplier

    z_d = (z^-2 - (2 s)^-2)^(-1/2)                                                        Theorem 1 of the same paper
"""

import math

import torch

from fedpara.state import State

CLIPPED = 1e-3
"""A received update counts as clipped if it is at most this share shorter than C, as clients clip before they send."""


def update_norm(d: State) -> float:
    """||d|| over all tensors, summed in float64."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in d.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def clip_update(d: State, bound: float) -> tuple[State, float]:
    """(d min(1, bound / ||d||), ||d||)"""
    norm = update_norm(d)
    if norm <= bound:
        return d, norm
    return {name: tensor * (bound / norm) for name, tensor in d.items()}, norm


def is_below(norm: float, bound: float) -> bool:
    """b_i: whether the client did not have to clip its update to the bound."""
    return norm < bound * (1 - CLIPPED)


def next_bound(bound: float, share: float, quantile: float, rate: float) -> float:
    """C exp(-eta_C (b - gamma)), where `share` is the noisy b."""
    return bound * math.exp(-rate * (share - quantile))


def noise_of_updates(noise: float, bit_noise: float) -> float:
    """z_d: the multiplier for the updates with which updates and bits together cost as much as z."""
    return 1 / math.sqrt(noise**-2 - (2 * bit_noise) ** -2)
