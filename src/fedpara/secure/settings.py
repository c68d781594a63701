"""SecAgg: the settings of secure aggregation. This module imports nothing heavy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedpara.errors import ConfigError
from fedpara.references import library_call

FARTHEST = 8.6
"""The largest Gaussian number that `privacy.randomness` can draw is sqrt(2 ln 2^53) = 8.572."""
SMALLEST = 3
"""The smallest cohort. The sum over two clients tells each of them the update of the other."""


@dataclass(frozen=True)
class SecAgg:
    """Settings of secure aggregation.

    threshold    the share of a client's neighbours (and of the cohort) that must stay until the end of a round
    clip         the largest norm of an update; a client scales a longer one down
    bits         the precision: steps of 2 range / 2^bits
    neighbours   how many clients each one shares masks with; None means all the others
    range        the largest change of one number; by default `clip`, which cuts nothing off
    """

    threshold: float = 0.6
    clip: float = 1.0
    bits: int = 22
    neighbours: int | None = None
    range: float | None = None

    def __post_init__(self) -> None:
        wrong = {
            # Half of the neighbours could reveal one of a client's secrets and the other half the other.
            "threshold": ("a share above 0.5 and at most 1, such as 0.6", 0.5 < self.threshold <= 1),
            "clip": ("a norm above 0", 0 < self.clip < math.inf),
            "bits": ("a whole number, 8 to 32", isinstance(self.bits, int) and 8 <= self.bits <= 32),
            "neighbours": ("2 or more, or None for all", self.neighbours is None or self.neighbours >= 2),
            "range": ("a number above 0, or None for clip", self.range is None or 0 < self.range < math.inf),
        }
        for name, (expected, holds) in wrong.items():
            if not holds:
                raise ConfigError(f"secagg: {name} is {getattr(self, name)}: expected {expected}.")

    def __str__(self) -> str:
        """The text that `read_secure` reads, with the values that differ from their defaults."""
        given = {name: v for name, v in vars(self).items() if v != getattr(SecAgg, name)}
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"secagg({listed})" if listed else "secagg"

    @property
    def step(self) -> float:
        """The distance between two adjacent fixed-point numbers."""
        return (self.range or self.clip) / float(1 << (self.bits - 1))

    def width(self, clients: int, noise: float = 0.0) -> int:
        """The bytes of one masked number, which hold the sum over the cohort with its sign and its noise."""
        most = self.largest(self.share(noise, clients))
        return -(-(2 * most * max(clients, 2) - 1).bit_length() // 8)

    def largest(self, share: float = 0.0) -> int:
        """The largest size of one client's number in steps. `share` is the standard deviation of its noise."""
        return (1 << (self.bits - 1)) + (math.ceil(FARTHEST * share / self.step) + 1 if share else 0)

    def share(self, noise: float, clients: int) -> float:
        """The standard deviation of one client's noise.

        The sum over `needed(clients)` clients then has the standard deviation `noise`.
        """
        return noise / math.sqrt(self.needed(clients))

    def needed(self, clients: int) -> int:
        """The number of these clients that must stay until the end of a round."""
        return max(2, math.ceil(self.threshold * clients - 1e-9))


SECURE: dict[str, Callable[..., Any]] = {"secagg": SecAgg}
"""The kinds of secure aggregation by name."""


def read_secure(text: str) -> SecAgg:
    """The settings from a config, such as secagg(clip=0.5, bits=20)."""
    name, arguments = library_call(text, SECURE, "secure", hint="")
    made: SecAgg = SECURE[name](**arguments)
    return made
