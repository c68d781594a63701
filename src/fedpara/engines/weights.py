"""How much each client's update counts in a round's mean.

examples    w_i = n_i            uniform    w_i = 1
max_share   w_i = min(n_i, c) with the largest c for which w_i <= max_share * sum_j w_j
"""

from collections.abc import Sequence


def capped(counts: Sequence[float], max_share: float) -> list[float]:
    """The counts, cut so that none is more than `max_share` of their sum. Equal where no cut can do that."""
    present = sorted(count for count in counts if count > 0)
    if not present or present[-1] <= max_share * sum(present):
        return list(counts)
    # With the m largest cut to c and the rest adding up to s: c = max_share (s + m c).
    rest = sum(present)
    for m, count in enumerate(reversed(present), 1):
        rest -= count
        if m * max_share >= 1:
            break
        c = max_share * rest / (1 - m * max_share)
        below = present[-m - 1] if m < len(present) else 0.0
        if c >= below and c > 0:
            return [min(count, c) for count in counts]
    return [min(count, present[0]) for count in counts]
