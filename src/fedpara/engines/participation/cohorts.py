"""Cohorts: who takes part in each round, and who of them is lost.

    S_t = sampler(t, N, m, generator of (seed, "cohort", t))
    i in S_t is lost if u < lost, with u uniform in [0, 1) from (seed, "lost", t, i)

A sampler may be called several times for the same round, also ahead of time: the batched engine plans the next round,
and looks at 20 rounds before the first. So it must draw from its generator only. It may fail for rounds after the last.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import index

import numpy as np
from numpy.typing import NDArray

from fedpara.choices import SAMPLERS
from fedpara.engines.rng import numpy_rng
from fedpara.errors import ConfigError, among, in_a_line

Sampler = Callable[[int, int, int, np.random.Generator], Iterable[int]]
"""(round, number of clients, cohort size, generator) -> the numbers of the chosen clients"""

LOST = "it was lost (simulated)"
"""Why a lost client sent no update."""


def uniform(round: int, clients: int, cohort: int, generator: np.random.Generator) -> Iterable[int]:
    """`cohort` clients without replacement. The cost does not grow with `clients`."""
    drawn: list[int] = generator.choice(clients, cohort, replace=False, shuffle=False).tolist()
    return drawn


def poisson(round: int, clients: int, cohort: int, generator: np.random.Generator) -> Iterable[int]:
    """Every client independently, with probability m / N. The cohort may be empty.

    The number of clients is then binomial, and all cohorts of the same size are equally likely.
    """
    return uniform(round, clients, int(generator.binomial(clients, cohort / clients)), generator)


def by_data(sizes: NDArray[np.int64]) -> Sampler:
    """A sampler with P(i in S) = min(1, c n_i): the more examples a client has, the more often it takes part.

    c is chosen so that a cohort has m clients. Clients without examples never take part. Systematic sampling in a
    random order gives these probabilities exactly, and needs no more than one pass over the clients.
    """

    def draw(round: int, clients: int, cohort: int, generator: np.random.Generator) -> Iterable[int]:
        p = inclusion(sizes, cohort)
        some = generator.permutation(np.flatnonzero((p > 0) & (p < 1)))
        ends = np.cumsum(p[some])
        points = generator.random() + np.arange(np.rint(ends[-1]) if len(some) else 0)
        drawn = some[np.searchsorted(ends[:-1], points, side="right")]
        return [*np.flatnonzero(p == 1).tolist(), *drawn.tolist()]

    return draw


def inclusion(sizes: NDArray[np.int64], cohort: int) -> NDArray[np.float64]:
    """p_i = min(1, c n_i) with sum_i p_i = m, or 1 for every client with examples if there are at most m."""
    p, left = np.zeros(len(sizes)), sizes > 0
    while left.any():
        share = (cohort - np.count_nonzero(p)) * sizes / sizes[left].sum()
        sure = left & (share >= 1)
        if not sure.any():
            return np.where(left, share, p)
        p[sure] = 1
        left &= ~sure
    return p


def find_sampler(sampler: str | Sampler, sizes: Callable[[], NDArray[np.int64]]) -> Sampler:
    """The sampler with that name, or the given function. `sizes` gives every client's number of examples."""
    if callable(sampler):
        return sampler
    if sampler == "by-data":
        counts = sizes()
        if not counts.any():
            raise ConfigError(
                "sampler 'by-data' needs clients with a known number of examples: use 'uniform'."
            )
        return by_data(counts)
    return {"uniform": uniform, "poisson": poisson}[sampler]


def check_sampler(sampler: object) -> None:
    if not callable(sampler) and sampler not in SAMPLERS:
        raise ConfigError(
            f"unknown sampler {sampler!r}: {among(str(sampler), SAMPLERS)} Or give a function (round, clients, cohort, "
            "generator) that returns client numbers."
        )


@dataclass(frozen=True)
class Cohorts:
    """The cohorts of a run, by round."""

    seed: int
    clients: int
    size: int
    sampler: Sampler = uniform
    lost: float = 0.0

    def draw(self, round: int) -> list[int]:
        """The clients of the round, sorted."""
        generator = numpy_rng(self.seed, "cohort", round)
        try:
            drawn = self.sampler(round, self.clients, self.size, generator)
        except Exception as error:
            raise ConfigError(
                f"the sampler failed in round {round} ({in_a_line(error)}): expected a function (round, clients, "
                "cohort, generator) that returns client numbers."
            ) from error
        return _sorted(drawn, self.clients, round)

    def loses(self, round: int, client: int) -> bool:
        """Whether the client is lost in this round."""
        return bool(self.lost) and numpy_rng(self.seed, "lost", round, client).random() < self.lost

    def present(self, round: int) -> list[int]:
        """The clients of the round that are not lost."""
        return [client for client in self.draw(round) if not self.loses(round, client)]


def _sorted(drawn: Iterable[int], clients: int, round: int) -> list[int]:
    """The drawn numbers as a sorted list. ConfigError if they are not distinct clients."""
    expected = f"expected distinct client numbers from 0 to {clients - 1}, such as [0, {clients - 1}]"
    try:
        chosen = sorted(map(index, drawn))
    except TypeError:
        raise ConfigError(f"the sampler returned {drawn!r} in round {round}: {expected}.") from None
    outside = [client for client in chosen if not 0 <= client < clients]
    twice = [a for a, b in pairwise(chosen) if a == b]
    if outside or twice:
        what = f"client {outside[0]}" if outside else f"client {twice[0]} twice"
        raise ConfigError(f"the sampler returned {what} in round {round}: {expected}.")
    return chosen
