"""flame: the largest group of similar directions, by single linkage of cosine distances, clipped to the median norm.

A backdoor or wrong labels show in the direction of an update.
"""

from itertools import pairwise

import torch
from torch import Tensor

from fedpara.robust.geometry import Geometry
from fedpara.robust.weighing import clip_factors, only


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
