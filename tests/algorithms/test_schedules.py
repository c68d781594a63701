"""Golden: each schedule against rates computed by hand, across rounds and within them."""

import math

import pytest

import fedpara as fp
from fedpara.algorithms import Local
from fedpara.algorithms.schedules import RateSchedule
from fedpara.errors import ConfigError

COSINE_4 = [1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2]
ACROSS: dict[str, tuple[RateSchedule, list[float]]] = {
    "cosine": (fp.cosine(), COSINE_4),
    "cosine, floor": (fp.cosine(floor=0.2), [0.2 + 0.8 * factor for factor in COSINE_4]),
    "cosine, warmup": (fp.cosine(warmup=2), [1 / 3, 2 / 3, 1.0, 0.5]),
    "cosine, its own length": (fp.cosine(rounds=2), [1.0, 0.5, 0.0, 0.0]),
    "linear": (fp.linear(), [1.0, 0.75, 0.5, 0.25]),
    "linear, floor": (fp.linear(floor=0.5), [1.0, 0.875, 0.75, 0.625]),
    "linear, warmup": (fp.linear(warmup=1), [0.5, 1.0, 2 / 3, 1 / 3]),
    "constant": (fp.constant(), [1.0, 1.0, 1.0, 1.0]),
    "constant, warmup": (fp.constant(warmup=3), [0.25, 0.5, 0.75, 1.0]),
    "step_decay": (fp.step_decay(2), [1.0, 1.0, 0.1, 0.1]),
    "step_decay, half": (fp.step_decay(1, 0.5), [1.0, 0.5, 0.25, 0.125]),
    "a function": (lambda at, rounds: 1 - at / rounds, [1.0, 0.75, 0.5, 0.25]),
}
WITHIN: dict[str, tuple[RateSchedule, list[float]]] = {
    # two rounds of two steps: at = 0, 0.5, 1, 1.5
    "linear": (fp.linear(within=True), [1.0, 0.75, 0.5, 0.25]),
    "cosine": (fp.cosine(within=True), COSINE_4),
    "warmup": (fp.constant(warmup=1, within=True), [0.0, 0.5, 1.0, 1.0]),
    "linear, warmup": (fp.linear(warmup=1, within=True), [0.0, 0.5, 1.0, 0.5]),
}


@pytest.mark.parametrize("name", ACROSS)
def test_rates_across_rounds(name: str) -> None:
    schedule, factors = ACROSS[name]
    local = Local(lr=0.3, schedule=schedule, rounds=4)
    for round, factor in enumerate(factors, 1):
        assert local.rates(round, 3) == pytest.approx([0.3 * factor] * 3, abs=1e-15)
        assert local.mean_lr(round, 3) == pytest.approx(0.3 * factor, abs=1e-15)


@pytest.mark.parametrize("name", WITHIN)
def test_rates_within_rounds(name: str) -> None:
    schedule, factors = WITHIN[name]
    local = Local(lr=0.3, schedule=schedule, rounds=2)
    assert local.rates(1, 2) + local.rates(2, 2) == pytest.approx([0.3 * f for f in factors], abs=1e-15)
    assert local.mean_lr(1, 2) == pytest.approx(0.3 * sum(factors[:2]) / 2, abs=1e-15)


def test_a_schedule_multiplies_the_decay_per_round() -> None:
    local = Local(lr=0.4, lr_decay=0.5, schedule=fp.linear(), rounds=4)
    assert [local.lr_at(round) for round in (1, 2, 3)] == pytest.approx([0.4, 0.15, 0.05])


def test_steps_join_from_one_round_to_the_next() -> None:
    """K steps in each of T rounds have the rates of T K steps in one line."""
    local = Local(lr=1.0, schedule=fp.cosine(warmup=2, within=True), rounds=6)
    rates = [rate for round in range(1, 7) for rate in local.rates(round, 10)]
    expected = [k / 20 if k < 20 else (1 + math.cos(math.pi * (k - 20) / 40)) / 2 for k in range(60)]
    assert rates == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fp.cosine(warmup=-1), "warmup is -1: expected a number of rounds, 0 or more"),
        (lambda: fp.step_decay(0), "every is 0: expected a number of rounds, 1 or more"),
        (
            lambda: Local(schedule="cosine"),
            r"schedule is 'cosine': expected a function, such as fp.cosine\(warmup=5\)",
        ),
    ],
)
def test_a_wrong_schedule_is_named(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
