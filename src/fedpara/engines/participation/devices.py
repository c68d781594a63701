"""Devices: how fast clients are, for a simulated clock.

    seconds of client i = bytes_down / bandwidth_i + steps_i / speed_i + bytes_up / bandwidth_i
    seconds of a round  = those of its slowest accepted client; the deadline if a client is late or lost

The bytes are those of the encoded messages. The clock is computed: a run never waits for it.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedpara.engines.rng import numpy_rng
from fedpara.errors import ConfigError

Amount = float | Sequence[float] | Callable[[np.random.Generator], float]
"""One number for all clients, one number per client, or a function that draws a client's number."""


@dataclass(frozen=True)
class Lognormal:
    """exp(N(ln median, sigma^2)): half of the clients are above the median, and none is at 0."""

    median: float
    sigma: float

    def __call__(self, generator: np.random.Generator) -> float:
        return self.median * math.exp(self.sigma * generator.standard_normal())


def lognormal(median: float, sigma: float) -> Lognormal:
    """A log-normal distribution over clients, for `Devices`.

    With sigma 0.5, two thirds of the clients are between 0.6 and 1.6 times the median.
    """
    if not (median > 0 and sigma >= 0):
        raise ConfigError(
            f"lognormal({median}, {sigma}): expected a median above 0 and a sigma of 0 or more."
        )
    return Lognormal(median, sigma)


@dataclass(frozen=True)
class Devices:
    """Bandwidth and speed of the clients' devices, which give a run a simulated clock (`Round.clock`).

    bandwidth   bytes per second, down and up; None for no transfer time
    speed       local steps per second; None for no computing time
    deadline    seconds that a round waits for its clients; updates that arrive later are refused

    Bandwidth and speed are a number for all clients, a sequence with one number per client, `lognormal(median, sigma)`,
    or a function of a NumPy generator. The run's seed decides what a distribution gives each client, once per run.
    """

    bandwidth: Amount | None = None
    speed: Amount | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "speed", "deadline"):
            value = getattr(self, name)
            if hasattr(value, "__len__"):  # a list, an array or a tensor
                object.__setattr__(self, name, tuple(_positive(name, float(one)) for one in value))
            elif value is not None and not callable(value):
                _positive(name, value)
        if self.bandwidth is None and self.speed is None:
            raise ConfigError(
                "devices without bandwidth and speed take no time: set at least one of the two."
            )

    def expect_clients(self, clients: int) -> None:
        """ConfigError if a table has another length than the federation."""
        for name in ("bandwidth", "speed"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != clients:
                raise ConfigError(f"{name} has {len(value)} numbers: expected one per client, {clients}.")

    def seconds(self, seed: int, client: int, bytes_down: int, steps: int, bytes_up: int) -> float:
        """How long the client takes to receive, train and send."""
        bandwidth, speed = (self.rate(seed, name, client) for name in ("bandwidth", "speed"))
        return bytes_down / bandwidth + steps / speed + bytes_up / bandwidth

    def wait(self, seed: int, client: int, steps: int, bytes_down: int, bytes_up: int) -> tuple[float, str]:
        """(how long the server waits for the client, why its update is too late or "")"""
        took, limit = self.seconds(seed, client, bytes_down, steps, bytes_up), self.deadline or math.inf
        late = f"it took {took:.4g} s, and the deadline is {limit:g} s (simulated)"
        return min(took, limit), late if took > limit else ""

    def clock(self, before: float | None, seconds: float, lost: bool) -> float:
        """The clock after a round that waited `seconds` for replies. The server waits for a lost client too."""
        return (before or 0.0) + (self.deadline if lost and self.deadline else seconds)

    def rate(self, seed: int, name: Literal["bandwidth", "speed"], client: int) -> float:
        """The client's bandwidth or speed; infinite if it is None."""
        amount: Amount | None = getattr(self, name)
        if amount is None:
            return math.inf
        if isinstance(amount, tuple):
            return float(amount[client])
        if callable(amount):
            drawn = amount(numpy_rng(seed, "devices", int(name == "speed"), client))
            return _positive(f"{name} of client {client}", drawn)
        return float(amount)  # type: ignore[arg-type]


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{name} is {value}: expected a number above 0.")
    return float(value)


def read_amount(name: str, given: float | str) -> float | Lognormal:
    """The number or distribution in a config: 5e6 or "lognormal(5e6, 0.5)"."""
    try:
        if found := re.fullmatch(r"\s*lognormal\(([^,]+),([^,]+)\)\s*", str(given)):
            return lognormal(float(found[1]), float(found[2]))
        return float(given)
    except ValueError:
        raise ConfigError(
            f"{name} is {given!r}: expected a number, or a distribution such as lognormal(5e6, 0.5)."
        ) from None


def read_devices(
    bandwidth: float | str | None, speed: float | str | None, deadline: float | None
) -> Devices | None:
    """The devices of a config, or None if it has none."""
    if bandwidth is None and speed is None and deadline is None:
        return None
    return Devices(
        None if bandwidth is None else read_amount("bandwidth", bandwidth),
        None if speed is None else read_amount("speed", speed),
        deadline,
    )
