"""Defences that weigh updates: x+ = x + sum_i c_i u_i, with c from the geometry of the round.

    krum(share)         c = 1 for the update with the smallest sum of its n - f - 2 smallest squared distances
    multi-krum(share)   the mean over the n - f updates with the smallest such sums
    rfa()               the geometric median, argmin_v sum_i w_i ||u_i - v||, by smoothed Weiszfeld steps
    centred-clip()      v = 0;  repeat:  v += sum_i w_i (u_i - v) min(1, tau / ||u_i - v||)
    norm-clip(bound)    sum_i w_i u_i min(1, tau / ||u_i||), tau = the median norm unless a bound is given
    fltrust(examples)   c_i proportional to max(0, cos(u_i, u_0)), each update scaled to ||u_0||

f = floor(share n) is the number of hostile clients that is assumed. w_i are the weights of the algorithm's mean.
"""

import torch
from torch import Tensor

from fedpara.robust.geometry import Geometry, median

ROUNDING = 1e-12


def krum_scores(g: Geometry, f: int) -> Tensor:
    """The sum of each update's n - f - 2 smallest squared distances to others (Blanchard et al., 2017)."""
    others = g.squared_distances.fill_diagonal_(torch.inf).sort(1).values
    return others[:, : max(1, len(g) - f - 2)].sum(1)


def assumed(share: float, n: int) -> int:
    """f = floor(share n), and no more than Krum allows for n updates: n >= 2 f + 3."""
    return max(0, min(int(share * n + ROUNDING), (n - 3) // 2))


def krum(g: Geometry, share: float) -> Tensor:
    return only(g, krum_scores(g, assumed(share, len(g))).argmin()[None])


def multi_krum(g: Geometry, share: float) -> Tensor:
    f = assumed(share, len(g))
    return only(g, krum_scores(g, f).argsort(stable=True)[: len(g) - f])


def only(g: Geometry, chosen: Tensor) -> Tensor:
    """The weighted mean of the chosen updates."""
    kept = torch.zeros_like(g.w)
    kept[chosen] = g.w[chosen]
    return kept / kept.sum()


def rfa(g: Geometry, steps: int = 100) -> Tensor:
    """The geometric median (Pillutla et al., 2022): a = beta / sum beta, beta_i = w_i / max(nu, ||u_i - v||)."""
    a = g.w
    for _ in range(steps):
        distances = g.distances_to(a)
        beta = g.w / distances.clamp_min(1e-6 * float(median(distances)) + 1e-150)
        fresh = beta / beta.sum()
        if torch.allclose(fresh, a, rtol=0, atol=1e-10):
            break
        a = fresh
    return a


def centred_clip(g: Geometry, tau: float | None, steps: int) -> Tensor:
    """Centred clipping (Karimireddy et al., 2021) from v = 0; without tau, the median distance in each step."""
    a = torch.zeros_like(g.w)
    for _ in range(steps):
        distances = g.distances_to(a)
        bound = median(distances) if tau is None else tau
        pull = g.w * (bound / distances.clamp_min(1e-150)).clamp(max=1)
        a = a * (1 - pull.sum()) + pull
    return a


def clip_factors(norms: Tensor, bound: float | None) -> Tensor:
    """min(1, tau / ||u_i||)"""
    tau = median(norms) if bound is None else bound
    return (tau / norms.clamp_min(1e-150)).clamp(max=1)


def norm_clip(g: Geometry, bound: float | None) -> Tensor:
    return g.w * clip_factors(g.norms, bound)


def fltrust(g: Geometry) -> Tensor:
    """FLTrust (Cao et al., 2021). All zero, so that x stays, if no update has a positive cosine with the server's."""
    assert g.trusted is not None
    dots, length = g.trusted
    norms = g.norms.clamp_min(1e-150)
    trust = (dots / norms / max(length, 1e-150)).clamp_min(0)
    return trust / trust.sum().clamp_min(1e-150) * length / norms
