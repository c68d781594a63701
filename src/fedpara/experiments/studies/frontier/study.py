"""`fedpara reproduce frontier` and `fedmud`: the runs of a scale, the choice by validation, the points of the figure.

    SCALE/validation/NAME-lrR-seed100    one run per combination and learning rate, scored on held-out examples
    SCALE/validation/NAME-lrR-seed101    the best rate again: further seeds show the spread but choose nothing
    SCALE/test/NAME-lrR-seedS            the rate that was best, scored on the test set; seeds 1 to 3

A run is found by its experiment, so any process may carry it out with `fedpara run --config`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal

from fedpara.errors import ConfigError, among
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.storage.summary import Summary
from fedpara.experiments.studies.frontier.combinations import Scale
from fedpara.experiments.studies.frontier.fedmud import FEDMUD
from fedpara.experiments.studies.frontier.scales import SCALES
from fedpara.experiments.studies.reproduce import Job, matches

FOLDER = "frontier"
ALL_SCALES = {**SCALES, **{f"fedmud-{name}": scale for name, scale in FEDMUD.items()}}
"""The scales by the folder of their runs."""
TRIAL_SEED = 100
"""The seed of the trials that choose. Repeated trials have the seeds after it."""
SEEDS = 3
"""Final runs have the seeds 1 to SEEDS."""
Stage = Literal["validation", "test"]
STAGES: tuple[Stage, ...] = ("validation", "test")
LOSS = 0.01
"""How much validation accuracy the leanest combination may lose against the first one."""


@dataclass(frozen=True)
class Point:
    """A combination and its finished runs, one per seed."""

    combination: str
    runs: tuple[Summary, ...]

    @property
    def accuracies(self) -> list[float]:
        """The accuracy at the last round, per seed."""
        return [run.accuracy or 0.0 for run in self.runs]

    @property
    def accuracy(self) -> float:
        return mean(self.accuracies)

    @property
    def sent(self) -> float:
        """The bytes of all messages in both directions, as the mean over the seeds."""
        return mean(run.bytes_up + run.bytes_down for run in self.runs)

    def sent_to(self, target: float) -> list[int] | None:
        """Bytes until the target is first reached, per seed. None if a seed does not reach it."""
        lines = [run.reached(target) for run in self.runs]
        return None if None in lines else [line["total_up"] + line["total_down"] for line in lines if line]


def scale_of(name: str, study: str = FOLDER) -> Scale:
    """The scale of `fedpara reproduce frontier` or `fedmud`."""
    known = SCALES if study == FOLDER else FEDMUD
    if name not in known:
        raise ConfigError(f"unknown scale {name!r}: {among(name, known)}")
    return known[name]


def trials(scale: Scale, combination: str, rounds: int | None = None) -> list[Experiment]:
    """One experiment per learning rate."""
    base = replace(
        scale.experiment(combination),
        validation=scale.validation,
        rounds=rounds or scale.trial_rounds,
        seed=TRIAL_SEED,
    )
    return [replace(base, lr=rate) for rate in scale.rates_of(combination)]


def best_trial(scale: Scale, combination: str, library: Library, rounds: int | None = None) -> Summary | None:
    """The finished trial with the best validation accuracy; of equal ones, the first."""
    found = [run for one in trials(scale, combination, rounds) if (run := library.find(one)) is not None]
    return max(found, key=lambda run: run.accuracy or 0.0, default=None)


def chosen_rate(scale: Scale, combination: str, library: Library, rounds: int | None = None) -> float | None:
    """The learning rate of the final runs. None if there is a choice and no trial has finished.

    `rounds` is the length of the trials, if it is not the scale's.
    """
    rates = scale.rates_of(combination)
    if len(rates) == 1:
        return rates[0]
    best = best_trial(scale, combination, library, rounds)
    return None if best is None else best.experiment.lr


def repeats(
    scale: Scale, combination: str, library: Library, seeds: int, rounds: int | None = None
) -> list[Experiment]:
    """The chosen trial with further seeds, so that it has `seeds` in total; empty before the choice."""
    rate = chosen_rate(scale, combination, library, rounds)
    first = next((one for one in trials(scale, combination, rounds) if one.lr == rate), None)
    return [replace(first, seed=TRIAL_SEED + more) for more in range(1, seeds)] if first is not None else []


def finals(
    scale: Scale, combination: str, library: Library, seeds: int = SEEDS, rounds: int | None = None
) -> list[Experiment]:
    """The chosen setting on the test set, one experiment per seed; empty before the choice."""
    rate = chosen_rate(scale, combination, library)
    base = replace(scale.experiment(combination), rounds=rounds or scale.base.rounds)
    return [replace(base, lr=rate, seed=seed) for seed in range(1, seeds + 1)] if rate is not None else []


def frontier_jobs(
    scale: Scale,
    stage: Stage,
    library: Library,
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    only: Sequence[str] = (),
) -> list[Job]:
    """Every run of the stage: the first seed or rate of all combinations comes before the second of any.

    `seeds` is by default 1 for trials and SEEDS for final runs. ConfigError if `only` matches no combination, or if a
    final run or a repeated trial waits for the choice.
    """
    seeds = seeds or (1 if stage == "validation" else SEEDS)
    if stage == "test" and scale.final_scale is not None:
        raise ConfigError(
            f"this scale has trials only: its final runs are those of --scale {scale.final_scale}."
        )
    names = [
        name for name in scale.combinations if not only or any(_chooses(one, name, scale) for one in only)
    ]
    if not names:
        raise ConfigError(
            f"--only {', '.join(only)!r}: no combination has this in its name. The first are "
            f"{', '.join(scale.combinations[:3])}."
        )
    first = {name: trials(scale, name, rounds) if stage == "validation" else [] for name in names}
    chosen = {
        name: repeats(scale, name, library, seeds, rounds)
        if stage == "validation"
        else finals(scale, name, library, seeds, rounds)
        for name in names
    }
    waiting = [name for name in names if not chosen[name]] if stage == "test" or seeds > 1 else []
    if waiting:
        raise ConfigError(
            f"{len(waiting)} of {len(names)} combinations have no finished trial, such as {waiting[0]!r}: the learning "
            "rates are chosen by validation. Run them first, with --validation and without --seeds."
        )
    return [
        Job(folder_name(name, e), e, library.find(e), library.resumable(e))
        for same in zip(*(first[name] + chosen[name] for name in names), strict=True)
        for name, e in zip(names, same, strict=True)
    ]


def _chooses(given: str, name: str, scale: Scale) -> bool:
    """Whether the text is this combination or, if it is not the name of any, matches this one."""
    return given == name if given in scale.combinations else matches(given, name)


def folder_name(combination: str, experiment: Experiment) -> str:
    words = combination.replace(" ", "_").replace("/", "_")
    return f"{words}-lr{experiment.lr:g}-seed{experiment.seed}"


def points(
    scale: Scale, stage: Stage, library: Library, seeds: int = SEEDS, rounds: int | None = None
) -> list[Point]:
    """The combinations that have finished runs, in the order of the scale."""
    found = []
    for name in scale.combinations:
        if stage == "validation":
            best = best_trial(scale, name, library, rounds)
            first, more = [best] if best is not None else [], repeats(scale, name, library, seeds, rounds)
        else:
            first, more = [], finals(scale, name, library, seeds, rounds)
        runs = (*first, *(run for e in more if (run := library.find(e)) is not None))
        if runs:
            found.append(Point(name, runs))
    return found


def front(points: Iterable[Point]) -> list[Point]:
    """The Pareto front, by bytes: no other point has at most as many bytes and a higher accuracy."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (one.sent, -one.accuracy)):
        if not kept or point.accuracy > kept[-1].accuracy:
            kept.append(point)
    return kept


def leanest(points: Sequence[Point]) -> Point | None:
    """The fewest bytes among the points whose accuracy is at most LOSS below that of the first one.

    This compares the first run of each, because not every trial is repeated with further seeds.
    """
    good = [one for one in points if one.accuracies[0] >= points[0].accuracies[0] - LOSS]
    return min(good, key=lambda one: one.sent, default=None)


def belongs(run: Path) -> bool:
    """Whether a run folder lies in a folder of this study: frontier/SCALE/STAGE/NAME."""
    *_, study, scale, stage, _ = ("", "", "", *run.parts)
    return study == FOLDER and scale in ALL_SCALES and stage in STAGES
