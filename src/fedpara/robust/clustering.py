"""Defences that look at directions: a backdoor or wrong labels show in the direction of an update.

    flame   the largest group of similar directions, by single linkage of cosine distances, clipped to the median norm
    auto    s_i = ||u_i|| (1 - m_i)^4,   m_i = the median cosine of u_i with the other updates
            evidence e_i = log(s_i / (t median(s))), standing m_i = 0.9 m_i + e_i, from -0.5 to 4
            drops m_i > 0, and updates with a negative product with the geometric median; then clips

Early in training honest updates agree, and hostile ones have smaller cosines. Later honest updates are short, and
hostile ones, which still have something to teach, are long. s sees both. t is 1.15 while honest updates agree (a median
cosine of 1/4 or more) and 1.3 when they no longer do. The standing lasts between rounds: a client that once pointed away
from all others stays out, also when directions no longer tell. Credit is small, so nobody can save up for an attack.
"""

from itertools import pairwise

import torch
from torch import Tensor

from fedpara.robust.geometry import Geometry, median
from fedpara.robust.weighing import clip_factors, only, rfa

POWER = 4
TIGHT, LOOSE = 1.15, 1.3
AGREEMENT = 0.25
DECAY, CREDIT, MOST = 0.9, 0.5, 4.0


def auto(g: Geometry) -> Tensor:
    """The weighted mean of the updates that are no outliers, clipped to the median norm."""
    clip = clip_factors(g.norms, None)
    kept = standing(g) <= 0
    if not kept.any():
        kept = suspicion(g) <= 1
    clipped = g.scaled(clip)
    with_most = clipped.gram @ rfa(clipped) >= 0
    if (kept & with_most).any():
        kept &= with_most
    return only(g, kept.nonzero().flatten()) * clip


def standing(g: Geometry) -> Tensor:
    """Each client's standing after this round: above 0, its update is not used."""
    evidence = suspicion(g).clamp_min(1e-6).log().clamp(-1, MOST)
    past = torch.zeros_like(evidence) if g.past is None else g.past
    return (DECAY * past + evidence).clamp(-CREDIT, MOST)


def suspicion(g: Geometry) -> Tensor:
    """s_i / (t median(s)): above 1 for an outlier. At least half of the updates are at most 1."""
    cosines = _others(g)
    s = g.norms * (1 - cosines.nanmedian(1).values) ** POWER
    agreement = min(1.0, max(0.0, float(cosines.nanmedian()) / AGREEMENT))
    t = LOOSE - (LOOSE - TIGHT) * agreement
    return s / (t * median(s)).clamp_min(1e-300)


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
