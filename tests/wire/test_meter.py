"""Golden: the paper's times and energies. Properties of the meter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.errors import UsageError
from fedpara.wire import (
    PAPER_MEGA,
    Meter,
    RoundTraffic,
    communication_seconds,
    energy_joules,
    round_seconds,
)

ORIGINAL, FEDPARA = 15_253_578 * 4 * 2, 1_545_442 * 4 * 2


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


@pytest.mark.parametrize(
    ("bytes_", "mbps", "printed", "within"),
    [
        (FEDPARA, 2, 47.2, 0.001),
        (FEDPARA, 10, 9.44, 0.001),
        (FEDPARA, 50, 1.88, 0.004),
        (ORIGINAL, 50, 18.61, 0.001),
        (ORIGINAL, 10, 94.68 - 1.64, 0.001),
        (ORIGINAL, 10, 94.04, 0.011),
        (ORIGINAL, 2, 470.2, 0.011),
    ],
)
def test_the_papers_times_follow_from_its_megabit(
    bytes_: int, mbps: float, printed: float, within: float
) -> None:
    assert communication_seconds(bytes_, mbps, PAPER_MEGA) == pytest.approx(printed, rel=within)
    assert communication_seconds(bytes_, mbps) != pytest.approx(printed, rel=0.03)


def test_a_megabit_is_a_million_bits() -> None:
    assert communication_seconds(250_000, 2) == 1.0
    assert round_seconds(1.5, 250_000, 2) == 2.5
    assert round_seconds(2.34, FEDPARA, 2, PAPER_MEGA) == pytest.approx(49.54, rel=0.001)
    for speed in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="Mbps"):
            communication_seconds(1, speed)


# Figure 3(g): GB and MJ to reach the target accuracy, original and FedPara on six settings.
BARS = [
    *((205.3, 5.1), (283.5, 7.0), (154.9, 3.8), (235.1, 5.8), (305.3, 7.5), (378.0, 9.3)),
    *((20.3, 0.5), (32.5, 0.8), (55.2, 1.4), (67.3, 1.7), (46.3, 1.1), (53.9, 1.3)),
]


@pytest.mark.parametrize(("gigabytes", "megajoules"), BARS)
def test_the_papers_energies_follow_from_the_default(gigabytes: float, megajoules: float) -> None:
    joules = [energy_joules(int((gigabytes + slack) * 2**30)) for slack in (-0.05, 0.05)]
    assert joules[0] / 1e6 < megajoules + 0.05
    assert joules[1] / 1e6 > megajoules - 0.05


def test_gigabytes_in_the_figure_are_binary() -> None:
    assert pytest.approx(20.3, abs=0.05) == 110 * 16 * FEDPARA / 2**30


def test_energy_is_proportional_to_the_bits() -> None:
    assert energy_joules(1000, joules_per_bit=1e-3) == pytest.approx(8.0)
    with pytest.raises(UsageError, match="joules per bit"):
        energy_joules(1, joules_per_bit=-1.0)
