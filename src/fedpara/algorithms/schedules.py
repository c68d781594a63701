"""Schedules of the learning rate: functions (at, rounds) -> factor of `lr`.

`at` is the time in rounds: t - 1 in the whole of round t, or t - 1 + k/K in step k of K for a schedule with `within`.
`rounds` is the length of the run, unless the schedule has its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedpara.errors import ConfigError

RateSchedule = Callable[[float, int], float]


@dataclass(frozen=True)
class _Shaped:
    """Rises linearly over `warmup` rounds, then follows a shape from 1 to `floor` until the last of `rounds`."""

    shape: Callable[[float], float]
    warmup: float
    floor: float
    rounds: int | None
    within: bool

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ConfigError(f"warmup is {self.warmup}: expected a number of rounds, 0 or more.")

    def __call__(self, at: float, rounds: int) -> float:
        step = 0.0 if self.within else 1.0  # whole rounds: the first one must not have a rate of 0
        if at < self.warmup:
            return (at + step) / (self.warmup + step)
        length = max((self.rounds or rounds) - self.warmup, 1e-9)
        done = min((at - self.warmup) / length, 1.0)
        return self.floor + (1 - self.floor) * self.shape(done)


def cosine(
    *, warmup: float = 0, floor: float = 0.0, rounds: int | None = None, within: bool = False
) -> RateSchedule:
    """floor + (1 - floor) (1 + cos(pi s)) / 2 with s from 0 to 1 after the warm-up."""
    return _Shaped(_half_cosine, warmup, floor, rounds, within)


def linear(
    *, warmup: float = 0, floor: float = 0.0, rounds: int | None = None, within: bool = False
) -> RateSchedule:
    """floor + (1 - floor) (1 - s) with s from 0 to 1 after the warm-up."""
    return _Shaped(_falling, warmup, floor, rounds, within)


def constant(*, warmup: float = 0, within: bool = False) -> RateSchedule:
    """1 after the warm-up."""
    return _Shaped(_one, warmup, 0.0, None, within)


@dataclass(frozen=True)
class _Steps:
    every: int
    factor: float

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every is {self.every}: expected a number of rounds, 1 or more.")

    def __call__(self, at: float, rounds: int) -> float:
        return self.factor ** (int(at) // self.every)


def step_decay(every: int, factor: float = 0.1) -> RateSchedule:
    """factor^floor(at / every)"""
    return _Steps(every, factor)


SCHEDULES: dict[str, Callable[..., RateSchedule]] = {
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
    "step_decay": step_decay,
}


def _half_cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def _falling(done: float) -> float:
    return 1 - done


def _one(done: float) -> float:
    return 1.0
