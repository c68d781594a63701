"""Fairness: how scores spread over clients.

worst tenth   the mean over the ceil(n / 10) clients with the worst scores
spread        sqrt(mean_i (s_i - mean s)^2), the population standard deviation
quantile q    s_(1 + q (n - 1)) of the sorted scores, linear between two of them
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """One metric over the clients that have a finite value. `worst` is None if the metric has no known direction."""

    clients: int
    worst: float | None
    worst_client: int | None
    q10: float
    q50: float
    q90: float
    mean: float

    @classmethod
    def of(cls, scores: Mapping[int, float], higher_is_better: bool | None) -> "Distribution | None":
        """None if no client has a finite value. Of several worst clients, `worst_client` is the first."""
        finite = {client: score for client, score in scores.items() if math.isfinite(score)}
        if not finite:
            return None
        worst = None
        if higher_is_better is not None:
            worst = (min if higher_is_better else max)(sorted(finite), key=finite.__getitem__)
        values = list(finite.values())
        q10, q50, q90 = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
        return cls(len(values), None if worst is None else finite[worst], worst, q10, q50, q90, fmean(values))


def worst_tenth(scores: Sequence[float], higher_is_better: bool = True) -> float:
    return fmean(sorted(scores, reverse=not higher_is_better)[: -(-len(scores) // 10)])


def spread(scores: Sequence[float]) -> float:
    return pstdev(scores)


def mean_of(scores: Sequence[Mapping[str, float]], name: str) -> float:
    """The mean over the clients of one of their scores."""
    return sum(values[name] for values in scores) / len(scores)


def fairness_of(scores: Sequence[float], higher_is_better: bool) -> tuple[float, float]:
    """(the worst tenth, the spread)"""
    return worst_tenth(scores, higher_is_better), spread(scores)
