"""auto: trust is earned. It drops clients by their update in this round and by what their updates looked like so far.

    m_i          the median cosine of u_i with the other updates
    s_i          log(||u_i|| / median ||u||) + power log((1 - m_i) / median(1 - m))
    direction_i  0.9 direction_i + m_i + sigma,  or 0.9 direction_i - 1 if u_i is a copy
    length_i     0.9 length_i + max(s_i - excess, -excess / 2)

An update counts if s_i <= max(0, -length_i) with the length before this round, and if direction_i >= 0 and
length_i <= excess / 2 after it. The result is the mean of these updates, clipped to the median norm of the round.
Medians are those of the clients whose standing was good before the round; sigma is the spread of their m. If their
median m is negative, it is subtracted from every m. A copy is an update whose nearest neighbour is closer than a tenth
of the median distance between nearest neighbours.

One round says little: an honest client with rare data is long and points elsewhere in some rounds. Over many rounds,
flipped updates have negative cosines, and backdoors and wrong labels stay long as long as the model does not learn
them. A backdoor that the model has learned no longer shows in any update. So a new client counts only if it is in the
better half, and each good round gives it more room. A good round regains less than a bad one loses: otherwise hostile
clients would return as soon as their attack succeeds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpara.robust.geometry import Geometry, median
from fedpara.robust.weighing import clip_factors, only

COLUMNS = 2
"""A standing is (direction, length)."""
DECAY = 0.9
COPY = 0.1
MOST = 3.0
"""The most that one round adds to the length."""
FEWEST = 3
"""Clients of good standing that are needed for medians. With fewer, the medians are those of everyone."""
NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class Standing:
    """The rule with `power` and `excess` of the formulas."""

    power: float
    excess: float

    def weigh(self, g: Geometry) -> Tensor:
        """The weighted mean of the updates that count, clipped."""
        after, s = self._judge(g)
        kept = self._good(after) & (s <= (-_past(g)[:, 1]).clamp_min(0))
        if not kept.any():  # nobody to prefer: only the norms are bounded
            kept = torch.ones_like(kept)
        return only(g, kept.nonzero().flatten()) * clip_factors(g.norms, None)

    def after(self, g: Geometry) -> Tensor:
        """The clients' standings after this round."""
        return self._judge(g)[0]

    def _judge(self, g: Geometry) -> tuple[Tensor, Tensor]:
        """(the standings after this round, s)"""
        past = _past(g)
        known = self._good(past)
        if known.sum() < FEWEST:
            known = torch.ones_like(known)
        m = g.cosines.fill_diagonal_(torch.nan)[:, known].nanmedian(1).values.nan_to_num(0)
        middle = median(m[known])
        sigma = NORMAL * median((m[known] - middle).abs())
        direction = (m - middle.clamp(max=0) + sigma).masked_fill(_copies(g), -1)
        s = _log_ratio(g.norms, known) + self.power * _log_ratio(1 - m, known)
        length = (s - self.excess).clamp(-self.excess / 2, MOST)
        return DECAY * past + torch.stack([direction, length], 1), s

    def _good(self, standing: Tensor) -> Tensor:
        return (standing[:, 0] >= 0) & (standing[:, 1] <= self.excess / 2)


def _past(g: Geometry) -> Tensor:
    return torch.zeros(len(g), COLUMNS, dtype=torch.float64) if g.past is None else g.past


def _log_ratio(values: Tensor, known: Tensor) -> Tensor:
    """log(value / median of the known ones)"""
    return (values.clamp_min(1e-150) / median(values[known]).clamp_min(1e-150)).log()


def _copies(g: Geometry) -> Tensor:
    nearest = g.squared_distances.fill_diagonal_(torch.inf).min(1).values.sqrt()
    return nearest < COPY * median(nearest)
