"""auto: drops clients by their standing, which sums what their updates looked like over their rounds.

    m_i          the median cosine of u_i with the other updates
    s_i          log(||u_i|| / median ||u||) + power log((1 - m_i) / median(1 - m))
    direction_i  0.9 direction_i + m_i + sigma,  or 0.9 direction_i - 1 if u_i is a copy
    length_i     0.9 length_i + s_i - excess

A client is trusted while direction >= 0 and length <= excess / 2. Medians are those of the clients that were trusted
before the round; sigma is the spread of their m. If their median m is negative, it is subtracted from every m. A copy
is an update whose nearest neighbour is closer than a tenth of the median distance between nearest neighbours. The
result is the mean of the trusted updates, clipped to the median norm of the round.

One round is weak evidence: an honest client with rare data also points elsewhere in some rounds, and late in training
honest updates hardly agree. Over several rounds, flipped updates have negative cosines on average. Backdoors and wrong
labels are long, because the other clients unlearn them. A standing separates what a single round does not.
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
"""Trusted clients that are needed for medians. With fewer, the medians are those of everyone."""
NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class Standing:
    """The rule with `power` and `excess` of the formulas. Updates are clipped to `clip` times the median norm."""

    power: float
    excess: float
    clip: float

    def weigh(self, g: Geometry) -> Tensor:
        """The weighted mean of the trusted updates, clipped."""
        kept = self._trusted(self.after(g))
        if not kept.any():  # nobody to prefer: only the norms are bounded
            kept = torch.ones_like(kept)
        bound = float(median(g.norms)) * self.clip
        return only(g, kept.nonzero().flatten()) * clip_factors(g.norms, bound)

    def after(self, g: Geometry) -> Tensor:
        """The clients' standings after this round."""
        past = torch.zeros(len(g), COLUMNS, dtype=torch.float64) if g.past is None else g.past
        known = self._trusted(past)
        if known.sum() < FEWEST:
            known = torch.ones_like(known)
        m = g.cosines.fill_diagonal_(torch.nan)[:, known].nanmedian(1).values.nan_to_num(0)
        middle = median(m[known])
        sigma = NORMAL * median((m[known] - middle).abs())
        direction = (m - middle.clamp(max=0) + sigma).masked_fill(_copies(g), -1)
        s = _log_ratio(g.norms, known) + self.power * _log_ratio(1 - m, known)
        return DECAY * past + torch.stack([direction, (s - self.excess).clamp(-MOST, MOST)], 1)

    def _trusted(self, standing: Tensor) -> Tensor:
        return (standing[:, 0] >= 0) & (standing[:, 1] <= self.excess / 2)


def _log_ratio(values: Tensor, known: Tensor) -> Tensor:
    """log(value / median of the known ones)"""
    return (values.clamp_min(1e-150) / median(values[known]).clamp_min(1e-150)).log()


def _copies(g: Geometry) -> Tensor:
    nearest = g.squared_distances.fill_diagonal_(torch.inf).min(1).values.sqrt()
    return nearest < COPY * median(nearest)
