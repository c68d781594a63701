"""Properties of the meter: what it counts per round and client."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.errors import UsageError
from fedpara.wire import Meter, RoundTraffic


def test_meter_counts_by_round_and_by_client() -> None:
    meter = Meter()
    for client in (7, 3):
        meter.down(0, client, b"x" * 100)
    meter.up(0, 7, b"y" * 30)
    assert {client: (t.up, t.down) for client, t in meter.by_client.items()} == {7: (30, 100), 3: (0, 100)}
    meter.down(4, 3, b"x" * 5)
    assert meter.rounds == [
        RoundTraffic(0, up=30, down=200, clients=2),
        RoundTraffic(4, up=0, down=5, clients=1),
    ]
    assert (meter.total_up, meter.total_down, meter.total) == (30, 205, 235)
    assert list(meter.by_client) == [3], "clients of past rounds are forgotten"
    with pytest.raises(UsageError, match="round 3 in round 4"):
        meter.up(3, 7, b"late")
    assert meter.total == 235


EVENTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 5), st.binary(max_size=9)), max_size=30
)


@settings(deadline=None)
@given(events=EVENTS, stop=st.integers(0, 30))
def test_a_meter_continues_from_the_rounds_of_another(
    events: list[tuple[bool, int, int, bytes]], stop: int
) -> None:
    events = sorted(events, key=lambda event: event[1])
    whole = Meter()
    for up, round_, client, message in events:
        (whole.up if up else whole.down)(round_, client, message)
    assert whole.total == sum(len(event[3]) for event in events)
    assert whole.total_up == sum(len(event[3]) for event in events if event[0])
    for traffic in whole.rounds:
        assert traffic.clients == len({event[2] for event in events if event[1] == traffic.round})
    # Runs stop between rounds.
    first = [event for event in events if event[1] < stop]
    half = Meter()
    for up, round_, client, message in first:
        (half.up if up else half.down)(round_, client, message)
    rest = Meter(half.rounds)
    for up, round_, client, message in events[len(first) :]:
        (rest.up if up else rest.down)(round_, client, message)
    assert rest.rounds == whole.rounds
