"""Fairness: how scores spread over clients.

worst tenth   the mean over the ceil(n / 10) clients with the worst scores
spread        sqrt(mean_i (s_i - mean s)^2), the population standard deviation
"""

from collections.abc import Sequence
from statistics import fmean, pstdev


def worst_tenth(scores: Sequence[float], higher_is_better: bool = True) -> float:
    return fmean(sorted(scores, reverse=not higher_is_better)[: -(-len(scores) // 10)])


def spread(scores: Sequence[float]) -> float:
    return pstdev(scores)
