"""Defences that look at directions: a backdoor or wrong labels show in the direction of an update.

    flame   the largest group of similar directions, by single linkage of cosine distances, clipped to the median norm
    auto    s_i = ||u_i|| (1 - m_i)^4,   m_i = the median cosine of u_i with the other updates
            drops updates with a negative product with the geometric median, then s_i > t median(s); clips the rest

Early in training honest updates agree, and hostile ones have smaller cosines. Later honest updates are short, and
hostile ones, which still have something to teach, are long. s sees both. t is 1.15 while honest updates agree (a median
cosine of 1/4 or more: a = 1) and 1.3 when they no longer do (a = 0).

Some attacks have no length of their own and show only while honest updates agree. Others teach several clients the same
thing. Two hostile updates then share more than all updates do (as in FoolsGold; Fung et al., 2020), and it shows in the
rounds in which two hostile clients meet. So `auto` remembers, for each client,

    standing_i = 0.9 standing_i + a max(0, 4 log((1 - m_i) / median(1 - m)) - 1) + 3 max(0, k_i - 0.3)
    k_i = the largest cosine of r_i with another r_j,   r_i = u_i - the coordinate-wise median of the updates

and drops clients with a standing above 0.3 before it takes medians, but no more than half of a cohort for that.
"""

from itertools import pairwise

import torch
from torch import Tensor

from fedpara.robust.geometry import Geometry, among, cosines_of, median
from fedpara.robust.weighing import clip_factors, only, rfa

POWER = 4
TIGHT, LOOSE = 1.15, 1.3
AGREEMENT = 0.25
DECAY, USUAL, TOLERATED = 0.9, 1.0, 0.3
COMPANY, USUAL_COMPANY = 3.0, 0.3


def auto(g: Geometry) -> Tensor:
    """The weighted mean of the updates that are no outliers, clipped to the median norm."""
    clipped = g.scaled(clip_factors(g.norms, None))
    doubt = torch.where(clipped.gram @ rfa(clipped) >= 0, standing(g), torch.inf)
    first = doubt <= doubt.median().clamp_min(TOLERATED)  # at least half of the updates
    c = torch.zeros_like(g.w)
    rest = among(g, first)  # short hostile updates would lower the medians
    kept = only(rest, (suspicion(rest) <= 1).nonzero().flatten())
    # Not to the median of the rest, which may be longer than every honest update if the tests err.
    c[first] = kept * clip_factors(g.norms, None)[first]
    return c


def suspicion(g: Geometry) -> Tensor:
    """s_i / (t median(s)): above 1 for an outlier."""
    s = g.norms * _aside(g)
    t = LOOSE - (LOOSE - TIGHT) * agreement(g)
    return s / (t * median(s)).clamp_min(1e-300)


def standing(g: Geometry) -> Tensor:
    """Each client's standing after this round."""
    aside = _aside(g)
    evidence = (aside / median(aside).clamp_min(1e-300)).clamp_min(1e-300).log() - USUAL
    past = torch.zeros_like(aside) if g.past is None else g.past
    return (
        DECAY * past
        + agreement(g) * evidence.clamp_min(0)
        + COMPANY * (company(g) - USUAL_COMPANY).clamp_min(0)
    )


def company(g: Geometry) -> Tensor:
    """k_i: how much an update shares with one other, beyond what all share."""
    assert g.residual is not None
    return cosines_of(g.residual).fill_diagonal_(-1).amax(1)


def agreement(g: Geometry) -> float:
    """a: 1 if the median cosine between updates is 1/4 or more, and 0 if it is not positive."""
    return min(1.0, max(0.0, float(_others(g).nanmedian()) / AGREEMENT))


def _aside(g: Geometry) -> Tensor:
    """(1 - m_i)^4"""
    return (1 - _others(g).nanmedian(1).values) ** POWER


def _others(g: Geometry) -> Tensor:
    """The cosines without those of each update with itself, which are NaN."""
    return g.cosines.fill_diagonal_(torch.nan)


def flame(g: Geometry) -> Tensor:
    """The first stages of FLAME (Nguyen et al., 2022): clustering and adaptive clipping, without noise.

    Among the linkage distances at which a group holds more than half of the updates, the largest gap ends the group.
    """
    return only(g, _majority(1 - g.cosines)) * clip_factors(g.norms, None)


def _majority(distances: Tensor) -> Tensor:
    """The members of the largest single-linkage group, cut at the largest gap."""
    n = len(distances)
    groups: list[tuple[float, Tensor]] = []
    for threshold in distances.flatten().unique().tolist():
        linked = distances <= threshold
        while not torch.equal(further := (linked.double() @ linked.double()) > 0, linked):
            linked = further
        largest = linked[linked.sum(1).argmax()]
        if largest.sum() > n / 2 and (not groups or largest.sum() > groups[-1][1].sum()):
            groups.append((threshold, largest))
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(groups)]
    chosen = max(range(len(gaps)), key=gaps.__getitem__) if gaps else 0
    members = groups[chosen][1]
    return members.nonzero().flatten()
