"""Trials: the settings that tuning tries for each method, and the choice among them by validation.

A trial's standard error is s / sqrt(n) over n seeds. The accuracy p of one seed on m examples has sqrt(p (1 - p) / m).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import Any

from fedpara.errors import ConfigError
from fedpara.experiments.config import Experiment
from fedpara.experiments.seeds import Group
from fedpara.experiments.studies.sweep import point_of, points, text_of

Grid = Mapping[str, Sequence[Any]]
"""Fields and the values to try."""

PROTOCOL = ("validation", "seed", "rounds")
"""Fields that the protocol sets. They are the same in every trial."""


@dataclass(frozen=True)
class Trial:
    """One setting of a method. `values` are the fields that it sets, sorted by name."""

    method: str
    number: int
    values: dict[str, Any]
    experiment: Experiment

    @property
    def name(self) -> str:
        return f"{self.method}-{self.number}"

    @property
    def label(self) -> str:
        return ", ".join(f"{name}={text_of(value)}" for name, value in self.values.items()) or "base"


@dataclass(frozen=True)
class Outcome:
    """A trial with its finished runs, one per seed. `examples` is the number of held-out examples, if it is known."""

    trial: Trial
    group: Group
    seeds: int = 1
    examples: int | None = None

    @property
    def score(self) -> float | None:
        """The mean over the seeds. None if a seed failed or has no finite score."""
        scores = self.group.scores
        whole = len(scores) == self.seeds and all(map(math.isfinite, scores))
        return sum(scores) / len(scores) if whole else None

    @property
    def standard_error(self) -> float | None:
        scores = self.group.scores
        if self.score is None:
            return None
        if len(scores) > 1:
            return stdev(scores) / math.sqrt(len(scores))
        counted = self.examples and self.group.metric.name == "accuracy"
        return math.sqrt(self.score * (1 - self.score) / self.examples) if counted else None  # type: ignore[operator]


@dataclass(frozen=True)
class Choice:
    """The outcomes of a method's trials. `chosen` is the best; of equal scores, the first."""

    outcomes: tuple[Outcome, ...]
    chosen: Outcome

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Choice | None":
        """None if no trial has a score."""
        scored = [one for one in outcomes if one.score is not None]
        return cls(tuple(outcomes), max(scored, key=_rank)) if scored else None

    @property
    def ties(self) -> list[Outcome]:
        """The other trials within one standard error of the chosen one. Equal scores are always ties."""
        error = self.chosen.standard_error or 0.0
        return [
            one
            for one in self.outcomes
            if one is not self.chosen and one.score is not None and _rank(self.chosen) - _rank(one) <= error
        ]


def _rank(outcome: Outcome) -> float:
    return -math.inf if outcome.score is None else outcome.group.metric.rank(outcome.score)


def all_trials(
    methods: Mapping[str, Experiment],
    grid: Grid,
    own: Mapping[str, Grid],
    one_at_a_time: bool,
    protocol: Mapping[str, Any],
) -> dict[str, list[Trial]]:
    """The trials of each method. ConfigError unless all have the same number, of at least two.

    `own` are the values of single methods, which override those of `grid`. `protocol` are the values of PROTOCOL.
    """
    found = {}
    for name, base in methods.items():
        varied = {**grid, **own.get(name, {})}
        for field in PROTOCOL:
            if field in varied:
                raise ConfigError(
                    f"{field} is in the grid: it must be the same in every trial. Leave it out."
                )
        try:
            found[name] = _trials(name, replace(base, **protocol), varied, one_at_a_time)
        except ConfigError as error:
            raise ConfigError(f"method {name}: {error}") from None
    counts = {name: len(trials) for name, trials in found.items()}
    if max(counts.values()) < 2:
        raise ConfigError("there is only one trial: give values to try, such as --set lr=0.05,0.1.")
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        few = min(counts, key=lambda name: counts[name])
        raise ConfigError(
            f"the methods have different numbers of trials ({listed}): a fair comparison needs the same number. Give "
            f"{few} more values of its own, such as --set {few}:lr=0.05,0.1."
        )
    return found


def _trials(method: str, base: Experiment, grid: Grid, one_at_a_time: bool) -> list[Trial]:
    """Every combination of the values, or the base and then each value alone. Equal settings count once."""
    if base.target is not None:
        raise ConfigError(
            f"target is {base.target:g}: tuning compares scores after equal rounds. Remove the target."
        )
    if one_at_a_time:
        each = [{}, *({name: value} for name in sorted(grid) for value in grid[name])]
        listed = [point_of(base, values, base.seed) for values in each]
    else:
        listed = points(base, grid, [base.seed])
    different = {point.experiment.identity: point for point in reversed(listed)}
    kept = [point for point in listed if different[point.experiment.identity] is point]
    return [Trial(method, number, point.values, point.experiment) for number, point in enumerate(kept)]
