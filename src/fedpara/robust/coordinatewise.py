"""Defences that work coordinate by coordinate on composed weights (Yin et al., 2018). All clients count the same.

median               the middle value; the mean of the two middle ones for an even number of clients
trimmed-mean(share)  the mean without the floor(share n) smallest and as many largest values
"""

from torch import Tensor


def coordinatewise_median(values: Tensor) -> Tensor:
    """The median over the first dimension."""
    n, ordered = len(values), values.sort(0).values
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed_mean(values: Tensor, share: float) -> Tensor:
    n = len(values)
    k = trimmed(share, n)
    return values.sort(0).values[k : n - k].mean(0)


def trimmed(share: float, n: int) -> int:
    """How many values are dropped at each end: floor(share n), and at least one value stays."""
    return min(int(share * n + 1e-12), (n - 1) // 2)
