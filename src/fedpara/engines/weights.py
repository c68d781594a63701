"""How much each client's update counts in a round's mean.

examples    w_i = n_i            uniform    w_i = 1
max_share   w_i = min(n_i, c) with the largest c for which w_i <= max_share * sum_j w_j
"""

from collections.abc import Mapping, Sequence

from fedpara.algorithms.core import Weighting


def round_weights(
    counts: Mapping[int, int], weighting: Weighting, max_share: float | None
) -> tuple[dict[int, float], list[str]]:
    """(the weight of every client that holds examples, a sentence for each that is capped)"""
    present = {client: count for client, count in counts.items() if count}
    if weighting == "uniform":
        return dict.fromkeys(present, 1.0), []
    if max_share is None:
        return {client: float(count) for client, count in present.items()}, []
    weights = dict(zip(present, capped(list(present.values()), max_share), strict=True))
    return weights, [
        f"client {client} with {present[client]} examples counts as {weight:.6g}: no client has more than "
        f"{max_share:.0%} of a round's weight"
        for client, weight in weights.items()
        if weight < present[client]
    ]


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
