"""Packing: assigns clients with different numbers of steps to lanes that end at about the same time.

The longest client comes first; each goes to the lane that is shortest so far. The idle ends are waste:

    waste = 1 - sum of steps / (lanes * longest lane)
"""

from collections.abc import Sequence
from dataclasses import dataclass

ACCEPTED_WASTE = 0.10


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
    lengths = [0] * lanes
    segments = []
    for client in sorted(range(len(steps)), key=lambda i: (-steps[i], i)):
        lane = min(range(lanes), key=lambda i: (lengths[i], i))
        segments.append(Segment(client, lane, lengths[lane], steps[client]))
        lengths[lane] += steps[client]
    return sorted(segments, key=lambda s: (s.end, s.lane))


def length(segments: Sequence[Segment]) -> int:
    return max((segment.end for segment in segments), default=0)


def waste(segments: Sequence[Segment], lanes: int) -> float:
    whole = lanes * length(segments)
    return 1 - sum(segment.steps for segment in segments) / whole if whole else 0.0


def choose(cohorts: Sequence[Sequence[int]], most: int) -> int:
    """The largest number of lanes whose mean waste over these cohorts is acceptable."""
    for lanes in range(most, 1, -1):
        mean = sum(waste(pack(steps, lanes), lanes) for steps in cohorts) / len(cohorts)
        if mean <= ACCEPTED_WASTE:
            return lanes
    return 1
