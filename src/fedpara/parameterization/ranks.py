"""The number of parameters at a rank, and the rank for a gamma.

    matrix m x n (Prop. 1)         2 R (m + n) parameters,        rank(W) <= R^2
    kernel O x I x k (Prop. 3)     2 R (O + I + R k) parameters,  rank(W^(1)) <= R^2, k = k1 k2 ...
    r_min = min(ceil(sqrt(m)), ceil(sqrt(n)))                     the least R that allows full rank
    r_max = the largest R with no more parameters than the dense weight
    r     = round((1 - gamma) r_min + gamma r_max), at least 1

Every function takes `k`: None for a matrix, whose formula is the kernel's without the core.
"""

from math import isqrt


def parameters(m: int, n: int, k: int | None, r: int, halves: int = 2) -> int:
    """halves * R (m + n [+ R k]), with two halves for FedPara and one for a low-rank weight."""
    return halves * r * (m + n + (0 if k is None else r * k))


def r_min(m: int, n: int) -> int:
    return min(_ceil_sqrt(m), _ceil_sqrt(n))


def r_max(m: int, n: int, k: int | None) -> int:
    """floor(mn / 2(m+n)), or the floor of the positive root of k R^2 + (O+I) R - O I k / 2 = 0."""
    return largest(m, n, k, m * n * (1 if k is None else k))


def largest(m: int, n: int, k: int | None, budget: int, halves: int = 2) -> int:
    """The largest R whose `parameters` stay within `budget`, in exact integer arithmetic."""
    budget //= halves
    s = m + n
    if k is None:
        return budget // s
    return (isqrt(s * s + 4 * k * budget) - s) // (2 * k)


def rank_for_gamma(m: int, n: int, k: int | None, gamma: float) -> int:
    return max(1, round((1 - gamma) * r_min(m, n) + gamma * r_max(m, n, k)))


def _ceil_sqrt(n: int) -> int:
    return isqrt(n - 1) + 1 if n > 0 else 0
