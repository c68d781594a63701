"""Spending: the privacy cost of a run after each round, and whether its budget is used up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedpara.errors import ConfigError
from fedpara.privacy.accountant import epsilon, epsilon_rdp
from fedpara.privacy.kinds import Privacy

LARGE_DELTA = 0.01
SEEDED = "the noise comes from a seed, so it hides nothing"


@dataclass(frozen=True)
class Spending:
    """The cost of a private run. `budget` is the largest epsilon, `seed` the seed of the noise.

    `uses`, with example-level privacy: how often the first rounds used the most used example.
    `hidden`, with secure aggregation: the server sees noised sums only, so there is a cost against the server too.
    `telling`, with secure aggregation: the probability of a cohort in which one client decides whether there is a sum.
    Sampling does not hide a client there, so delta has to cover all such rounds.
    """

    kind: Privacy
    clients: int
    cohort: int  # expected, q N
    delta: float
    budget: float | None = None
    seed: int | None = None
    uses: Callable[[int], int] | None = None
    hidden: bool = False
    telling: float = 0.0

    def costs(self, rounds: int) -> tuple[float, float, int, float]:
        """(noise, sampling probability, number of Gaussian mechanisms, delta)"""
        if self.uses is not None:
            return self.kind.noise, 1.0, self.uses(rounds), self.delta
        return self.kind.noise, self.cohort / self.clients, rounds, self.delta - rounds * self.telling

    def epsilon(self, rounds: int) -> float:
        return self._cost(epsilon, rounds)

    def epsilon_server(self, rounds: int) -> float:
        """Epsilon against a server that sees noised sums and knows the cohorts, for a client that is in every round."""
        return epsilon(self.kind.noise, 1.0, rounds, self.delta)

    def _cost(self, by: Callable[[float, float, int, float], float], rounds: int) -> float:
        noise, sampling, count, delta = self.costs(rounds)
        if not self.hidden:
            return by(noise, sampling, count, delta)
        seen = by(noise, 1.0, rounds, self.delta)  # the models follow from what the server sees
        return min(seen, by(noise, sampling, count, delta)) if delta > 0 else seen

    def spent(self, rounds: int) -> bool:
        """Whether one more round would cost more than the budget."""
        return self.budget is not None and self.epsilon(rounds + 1) > self.budget

    def refuse_spent(self) -> None:
        """ConfigError if the first round alone costs more than the budget."""
        if self.spent(0):
            raise ConfigError(
                f"epsilon is {self.budget:g}: the first round of {self.kind} already costs {self.epsilon(1):.4g} at "
                f"delta {self.delta:.4g}. Raise the noise or the budget; `fedpara privacy` computes the noise."
            )

    def line(self, rounds: int, bound: float) -> dict[str, Any]:
        """The run's privacy cost after these rounds, as metrics.jsonl records it."""
        return {
            "kind": self.kind.name,
            "epsilon": self.epsilon(rounds),
            "epsilon_rdp": self._cost(epsilon_rdp, rounds),
            **({"epsilon_server": self.epsilon_server(rounds)} if self.hidden else {}),
            "delta": self.delta,
            "noise": self.kind.noise,
            "clip": bound,
            "next": self.epsilon(rounds + 1),
            "private": self.seed is None,
        }


def delta_in_words(delta: float) -> str:
    """What follows a delta: nothing, or that it is too large."""
    if delta <= LARGE_DELTA:
        return ""
    return ", which is too large to protect anyone: set a smaller delta, or take more clients"


def in_words(line: dict[str, Any]) -> str:
    """The recorded cost as text: epsilon 3.9 at delta 1e-05."""
    cost = f"epsilon {line['epsilon']:.3g} at delta {line['delta']:.3g}"
    cost += delta_in_words(line["delta"])
    return cost if line["private"] else f"not private ({SEEDED}); with secret noise: {cost}"
