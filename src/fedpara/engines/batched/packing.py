"""Packing: assigns clients with different numbers of steps to lanes that end at about the same time.

The longest client comes first; each goes to the lane that is shortest so far. The idle ends are waste:

    waste = 1 - sum of steps / (lanes * longest lane)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

ACCEPTED_WASTE = 0.10
ROUNDING = 1e-9
"""More than the rounding error of a mean of wastes."""


@dataclass(frozen=True)
class Segment:
    """One client's stay in a lane."""

    client: int  # its position in the cohort
    lane: int
    start: int
    steps: int

    @property
    def end(self) -> int:
        return self.start + self.steps


def pack(steps: Sequence[int], lanes: int) -> list[Segment]:
    """The segments, ordered by their end."""
    ends = [(0, lane) for lane in range(lanes)]  # a heap: the shortest lane comes first
    segments = []
    for client in sorted(range(len(steps)), key=lambda i: -steps[i]):
        start, lane = ends[0]
        segments.append(Segment(client, lane, start, steps[client]))
        heapreplace(ends, (start + steps[client], lane))
    return sorted(segments, key=lambda s: (s.end, s.lane))


def length(segments: Sequence[Segment]) -> int:
    return max((segment.end for segment in segments), default=0)


def waste(segments: Sequence[Segment], lanes: int) -> float:
    return _waste(sum(segment.steps for segment in segments), lanes * length(segments))


def choose(cohorts: Sequence[Sequence[int]], most: int) -> int:
    """The largest number of lanes whose mean waste over these cohorts is acceptable."""
    totals, longest = [sum(steps) for steps in cohorts], [max(steps, default=0) for steps in cohorts]

    def mean_waste(lanes: int, lengths: Sequence[int]) -> float:
        wastes = (_waste(total, lanes * length) for total, length in zip(totals, lengths, strict=True))
        return sum(wastes) / len(cohorts)

    for lanes in range(most, 1, -1):
        # The longest lane is at least as long as the longest client. Most numbers of lanes are too many for that.
        if mean_waste(lanes, longest) > ACCEPTED_WASTE + ROUNDING:
            continue
        if mean_waste(lanes, [length(pack(steps, lanes)) for steps in cohorts]) <= ACCEPTED_WASTE:
            return lanes
    return 1


def _waste(steps: int, whole: int) -> float:
    return 1 - steps / whole if whole else 0.0
