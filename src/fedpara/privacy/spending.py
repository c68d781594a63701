"""Spending: what a run has spent after each round, and when its budget is spent."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedpara.errors import ConfigError
from fedpara.privacy.accountant import epsilon, epsilon_rdp
from fedpara.privacy.kinds import User

SEEDED = "the noise comes from a seed, so it hides nothing"


@dataclass(frozen=True)
class Spending:
    """The cost of a run with user-level privacy. `budget` is the largest epsilon, `seed` that of the noise."""

    kind: User
    clients: int
    cohort: int  # expected, q N
    delta: float
    budget: float | None = None
    seed: int | None = None

    @cached_property
    def sampling(self) -> float:
        """q, the probability with which a client takes part in a round."""
        return self.cohort / self.clients

    def epsilon(self, rounds: int) -> float:
        return epsilon(self.kind.noise, self.sampling, rounds, self.delta)

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
        """What metrics.jsonl says of the run after these rounds."""
        return {
            "kind": self.kind.name,
            "epsilon": self.epsilon(rounds),
            "epsilon_rdp": epsilon_rdp(self.kind.noise, self.sampling, rounds, self.delta),
            "delta": self.delta,
            "noise": self.kind.noise,
            "clip": bound,
            "next": self.epsilon(rounds + 1),
            "private": self.seed is None,
        }


def in_words(line: dict[str, Any]) -> str:
    """A line of metrics.jsonl for people: epsilon 3.9 at delta 1e-05."""
    cost = f"epsilon {line['epsilon']:.3g} at delta {line['delta']:.3g}"
    return cost if line["private"] else f"not private ({SEEDED}); with secret noise: {cost}"
