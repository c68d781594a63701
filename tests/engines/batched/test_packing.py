"""Properties: packing with a heap, and fewer numbers of lanes that are tried, give what the definitions give."""

from hypothesis import given
from hypothesis import strategies as st

from fedpara.engines.batched import packing
from fedpara.engines.batched.packing import ACCEPTED_WASTE, Segment

STEPS = st.lists(st.integers(0, 40), max_size=12)


def by_definition(steps, lanes):
    """The longest client first, each to the lane that is shortest so far; the first of these if there are several."""
    lengths, segments = [0] * lanes, []
    for client in sorted(range(len(steps)), key=lambda i: (-steps[i], i)):
        lane = min(range(lanes), key=lambda i: (lengths[i], i))
        segments.append(Segment(client, lane, lengths[lane], steps[client]))
        lengths[lane] += steps[client]
    return sorted(segments, key=lambda s: (s.end, s.lane))


def chosen_by_definition(cohorts, most):
    for lanes in range(most, 1, -1):
        wastes = [packing.waste(by_definition(steps, lanes), lanes) for steps in cohorts]
        if sum(wastes) / len(cohorts) <= ACCEPTED_WASTE:
            return lanes
    return 1


@given(STEPS, st.integers(1, 14))
def test_a_heap_packs_as_the_definition(steps, lanes):
    assert packing.pack(steps, lanes) == by_definition(steps, lanes)


@given(st.lists(STEPS, min_size=1, max_size=3), st.integers(0, 14))
def test_skipped_numbers_of_lanes_were_too_many(cohorts, most):
    assert packing.choose(cohorts, most) == chosen_by_definition(cohorts, most)


def test_a_large_cohort_is_packed_for_few_numbers_of_lanes(monkeypatch):
    """1,000 clients of up to 9 steps: the definition packs some 500 times, and each takes 1,000 x lanes comparisons."""
    steps, packed, pack = [1 + i % 9 for i in range(1000)], [], packing.pack
    monkeypatch.setattr(packing, "pack", lambda *given: packed.append(given) or pack(*given))
    lanes = packing.choose([steps], 1000)
    assert packing.waste(pack(steps, lanes), lanes) <= ACCEPTED_WASTE
    assert len(packed) < 100
