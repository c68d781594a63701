"""Golden: the paper's times and energies."""

import pytest

from fedpara.errors import UsageError
from fedpara.wire import PAPER_MEGA, communication_seconds, energy_joules, round_seconds

ORIGINAL, FEDPARA = 15_253_578 * 4 * 2, 1_545_442 * 4 * 2


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
