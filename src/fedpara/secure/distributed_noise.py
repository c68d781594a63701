"""Distributed noise: each client adds its share of the noise before it masks, so the server sees only a noised sum.

    client i    q_i = floor((d_i + g_i) / step + u_i),   g_i ~ N(0, (z C)^2 / t),   ||d_i|| <= C
    the sum     step sum_i q_i  has noise of variance (m / t) (z C)^2 >= (z C)^2

m clients stay until their vectors have arrived. t is the smallest m for which the server can remove the masks. So the
noise multiplier is at least z, whoever drops out.

The noise is a continuous Gaussian that is rounded to the grid with the update. With x_i = (d_i + g_i) / step, the sum
of the q_i is X = sum_i x_i plus a remainder that depends only on the fractions of the x_i. Given X, the fraction of one
more x_i is uniform up to a factor 1 +- 2.1 exp(-pi^2 s^2), where s is the noise of a client in steps. So the sum of the
q_i is a function of X and of independent random numbers: post-processing of the Gaussian mechanism. With s >= 8, which
is checked before a run, all factors together change epsilon by less than 1e-250.
"""

import math
from dataclasses import dataclass

from fedpara.privacy.randomness import Noise
from fedpara.secure.fixed_point import Floats
from fedpara.secure.settings import SecAgg

FEWEST_STEPS = 8.0
"""The smallest standard deviation of a client's noise, in steps of fixed point."""
ROOM = 1.01
"""The server always adds a little noise: without any, the models would show the grid of the sum."""


@dataclass(frozen=True)
class ClientNoise:
    """`scale` is z C; the numbers come from `source`."""

    scale: float
    source: Noise

    def drawn(self, how: SecAgg, cohort: int, length: int) -> Floats:
        """g_i"""
        return how.share(self.scale, cohort) * self.source.draw(length)


def server_noise(scale: float, how: SecAgg, cohort: int, stayed: int) -> float:
    """The standard deviation of what the server adds: the models' noise then does not tell how many clients stayed.

    The variance of both together is 1.01 (z C)^2 / threshold.
    """
    missing = ROOM / how.threshold - stayed / how.needed(cohort)
    return scale * math.sqrt(missing)
