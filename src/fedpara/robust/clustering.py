"""Defences that look at directions: a backdoor or wrong labels show in the direction of an update.

    flame   the largest group of similar directions, by single linkage of cosine distances, clipped to the median norm
    auto    flame's group without clients in bad standing and without updates that stand aside

A backdoor or wrong labels teach several clients the same thing. Two hostile updates then share more than all updates
do (as in FoolsGold; Fung et al., 2020), and it shows in the rounds in which two hostile clients meet. So `auto`
remembers

    standing_i = standing_i / 2 + max(0, k_i - 4.5),   k_i = max_j z(max_l z(c_lij)),   c_lij = cos(r_li, r_lj)
    r_i = v_i - the coordinate-wise median of v,       v_i = u_i, clipped to the median norm

for each client, and drops those above 0.5, but no more than half of a cohort. r_li is the part of r_i in layer l, and z
is a robust z-score among all pairs i, j: (c - median(c)) / spread(c). It makes the threshold the same for all networks:
cosines of honest updates lie within 0.4 of each other in a small network, and within 0.1 in a large one. The spread is
the length of the shortest interval that holds a third of the values, over that of a standard normal: hostile updates
split the pairs into groups (hostile, honest and mixed), and a third is less than the largest group. It is at least
1 / sqrt(d) in a layer of d numbers, the spread of random directions, and 0.5 for the maxima over layers.
Wrong labels show in the last layers long before they show in the sum of all layers.
The medians behind r and v are those of clients whose standing before the round was good: late in training hostile
updates are much longer than honest ones, and four of ten would pull the median along.

In the first rounds honest updates agree, and a backdoor that enters then is hard to notice later. Hostile updates
have smaller cosines with the others, or are longer. So `auto` drops updates with

    a s_i > 1.15 median(s),   s_i = ||u_i|| (1 - m_i)^4,   m_i = the median cosine of u_i with the other updates

a is 1 while honest updates agree (a median cosine of 1/4 or more) and falls to 0 with that cosine.
"""

from itertools import pairwise

import torch
from torch import Tensor

from fedpara.robust.geometry import Geometry, cosines_of, median
from fedpara.robust.weighing import clip_factors, only

DECAY, USUAL, TOLERATED = 0.5, 4.5, 0.5
POWER, ASIDE, AGREEMENT = 4, 1.15, 0.25
NORMAL_THIRD = 0.8615
"""A third of normal values lies within this many standard deviations (2 Phi^-1(2 / 3))."""
MAXIMA = 0.5
"""The least spread that is assumed for the maxima over layers."""


def auto(g: Geometry) -> Tensor:
    """The weighted mean of the updates that pass all three tests, clipped to the median norm.

    The group holds more than half of the updates, and at least half of all are in good standing, so some pass both
    tests. If all of these would be dropped as outliers, they are kept.
    """
    grouped = torch.zeros_like(g.w, dtype=torch.bool)
    grouped[_majority(1 - g.cosines)] = True
    usual = grouped & _good(standing(g))
    kept = usual & ~aside(g)
    return only(g, kept if kept.any() else usual) * clip_factors(g.norms, None)


def standing(g: Geometry) -> Tensor:
    """Each client's standing after this round: 0 is the best."""
    assert g.past is not None
    return DECAY * g.past + (company(g) - USUAL).clamp_min(0)


def trusted(g: Geometry) -> Tensor:
    """Which clients were in good standing before this round."""
    assert g.past is not None
    return _good(g.past)


def company(g: Geometry) -> Tensor:
    """k_i: how much an update resembles its most similar one in some layer, beyond what all updates share."""
    assert g.residual is not None
    grams, sizes = g.residual
    n = len(g)
    if n < 3:
        return torch.zeros_like(g.w)
    i, j = torch.triu_indices(n, n, 1)
    in_layers = _z_scores(cosines_of(grams)[:, i, j], sizes[:, None] ** -0.5)
    z = torch.full_like(g.gram, -torch.inf)
    z[i, j] = z[j, i] = _z_scores(in_layers.amax(0), MAXIMA)
    return z.amax(1)


def _z_scores(values: Tensor, least: Tensor | float) -> Tensor:
    """(v - median(v)) / max(spread(v), least) over the last dimension."""
    ordered = values.sort(-1).values
    third = -(-ordered.shape[-1] // 3)
    shortest = (ordered[..., third:] - ordered[..., :-third]).amin(-1, keepdim=True)
    centred = values - values.quantile(0.5, -1, keepdim=True)
    return centred / (shortest / NORMAL_THIRD).clamp_min(least)


def aside(g: Geometry) -> Tensor:
    """Which updates are unusually long or point elsewhere. Fewer count as such if honest updates disagree."""
    others = g.cosines.fill_diagonal_(torch.nan)
    s = g.norms * (1 - others.nanmedian(1).values) ** POWER
    a = min(1.0, max(0.0, float(others.nanmedian()) / AGREEMENT))
    return a * s > ASIDE * median(s)


def _good(standings: Tensor) -> Tensor:
    """Which standings are tolerated; at least half of them are."""
    return standings <= standings.median().clamp_min(TOLERATED)


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
