"""Runs that differ only in the seed, and means over their seeds.

mean ± t(0.975, n - 1) s / sqrt(n)
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fedpara.experiments.object_digests import without_weights
from fedpara.experiments.storage.summary import Primary, Summary


@dataclass(frozen=True)
class Mean:
    """The mean of n values. `half` is half the width of its 95% interval, or None for one value."""

    value: float
    half: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean | None":
        if not values:
            return None
        return cls(statistics.mean(values), half_width(values) if len(values) > 1 else None, len(values))

    @property
    def low(self) -> float:
        return self.value - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.value + (self.half or 0.0)


def half_width(values: Sequence[float], decimals: int | None = None) -> float:
    """t(0.975, n - 1) s / sqrt(n), for at least two values. t is rounded to the given decimals."""
    n = len(values)
    t = t_quantile(n - 1)
    return (t if decimals is None else round(t, decimals)) * statistics.stdev(values) / math.sqrt(n)


@cache
def t_quantile(freedom: int, p: float = 0.975) -> float:
    """The p-quantile of Student's t for a whole number of degrees of freedom and p above 0.5."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < 2 * p - 1:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 2 * p - 1 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t), the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = total = (math.cos(angle) if odd else 1.0) if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series


@dataclass(frozen=True)
class Group:
    """Runs of one setting, at most one per seed."""

    runs: tuple[Summary, ...]

    @property
    def metric(self) -> Primary:
        return self.runs[0].metric if self.runs else Primary()

    @property
    def scores(self) -> list[float]:
        """The final score of each run that has one."""
        return [run.final for run in self.runs if run.final is not None]

    @property
    def score(self) -> Mean | None:
        return Mean.of(self.scores)

    @property
    def rank(self) -> float:
        """A key for sorting: the setting with the best mean has the largest rank."""
        return -math.inf if self.score is None else self.metric.rank(self.score.value)


def group(runs: Iterable[Summary]) -> list[Group]:
    """The groups in the order of the runs. Of two runs of the same experiment and seed, the longer one is used."""
    found: dict[tuple[str, Primary], dict[int, Summary]] = {}
    for run in runs:
        if not run.metrics:
            continue
        setting = replace(run.experiment, seed=0, objects=without_weights(run.experiment.objects))
        same = found.setdefault((setting.identity, run.metric), {})
        known = same.get(run.experiment.seed)
        if known is None or known.rounds < run.rounds:
            same[run.experiment.seed] = run
    return [Group(tuple(same[seed] for seed in sorted(same))) for same in found.values()]
