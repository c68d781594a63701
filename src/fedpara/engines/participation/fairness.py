"""Fairness: how scores spread over clients.

worst tenth   the mean over the ceil(n / 10) clients with the worst scores
spread        sqrt(mean_i (s_i - mean s)^2), the population standard deviation
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev


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
