"""Tables of runs that are not the paper's: one section per data set and split, one row per setting.

A setting is a config apart from its seed. Scores are mean ± t(0.975, n - 1) s / sqrt(n) over its seeds.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from fedpara.experiments import Experiment, Summary
from fedpara.experiments.config import FREE
from fedpara.experiments.object_digests import digests, without_weights
from fedpara.experiments.paper import Cell, Study
from fedpara.experiments.seeds import Group, Mean, group
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.storage.summary import Primary, score_of
from fedpara.report.series import Series, data_of, label_of, scored_on, word_of
from fedpara.report.tables import NO_NUMBER, NOT_SCORED, Entry, Sample, Table

INTERVAL = (
    "± is half the width of the 95% confidence interval of the mean over seeds (Student's t). "
    "One seed has no interval."
)
NO_ROUND = "No run has finished a round yet."
_LENGTHS = "The seeds of a setting did different numbers of rounds. Each run counts with its last score."
_EVERYONE = (
    "The score is the mean over all clients' own models at the end, without further training. The curve shows the "
    "clients of each round after their training."
)
_COHORT = (
    "Some runs were not scored on all clients at the end. They count with the clients of their last round."
)
_CLIENTS = (
    "The worst tenth is the mean over the 10% of the clients with the worst scores, and the standard deviation is over "
    "all clients. Both are of each run; ± is over seeds."
)
_SEEDED = (
    "Some runs drew their noise from a seed. They are not private: epsilon is what the same run would cost with secret "
    "noise."
)
_REACHED = "The target is the best round score that every run reaches."

_OF_PANEL = frozenset({"dataset", "split", "validation", "personal", "test_owners", "seed", *FREE})
"""Fields that do not distinguish the settings of a section."""


@dataclass(frozen=True)
class Unit:
    name: str
    bytes: int

    @classmethod
    def of(cls, most: float) -> "Unit":
        """The largest unit in which the largest number is at least 1."""
        return next((unit for unit in _UNITS if most >= unit.bytes), _UNITS[-1])


_UNITS = (Unit("GB", 10**9), Unit("MB", 10**6), Unit("kB", 10**3))


@dataclass(frozen=True)
class Column:
    name: str
    measure: Callable[[Summary], float | None]
    style: str = "4"
    spread: bool = False
    aimed: bool = False
    missing: str = NOT_SCORED


@dataclass(frozen=True)
class Section:
    """The settings that were scored on the same data with the same metric, the best first."""

    panel: str
    series: tuple[Series, ...]

    @property
    def runs(self) -> list[Summary]:
        return [run for one in self.series for run in one.runs]

    @property
    def metric(self) -> Primary:
        return self.series[0].metric

    @property
    def unit(self) -> Unit:
        return Unit.of(max(run.bytes_up + run.bytes_down for run in self.runs))

    @property
    def targets(self) -> list[float]:
        """The targets of the experiments. If they have none, the best score that every run reaches."""
        given = {run.experiment.target for run in self.runs if run.experiment.target is not None}
        return sorted(given) if given else _common_target(self)


def sections(runs: Iterable[Summary]) -> list[Section]:
    """The runs with at least one round, grouped by their test data and metric."""
    panels: dict[tuple[str, Primary], list[Group]] = {}
    for same in group(runs):
        panels.setdefault((_panel(same.runs[0].experiment), same.metric), []).append(same)
    return [_section(metric, groups) for (_, metric), groups in panels.items()]


def _panel(experiment: Experiment, model: str = "") -> str:
    words = [data_of(experiment), *filter(None, ["personal models" * experiment.personal, model])]
    return ", ".join(words) + scored_on(experiment)


def tables(found: Sequence[Section], library: Library) -> list[Table]:
    """For each section, a table of results and, if clients were scored, a table of their scores."""
    made = []
    for number, section in enumerate(found, 1):
        notes = _notes(section)
        made.append(_table(f"runs-{number}", section.panel, notes, section, _results(section), library))
        if any({"worst_tenth", "spread"} & (run.everyone or {}).keys() for run in section.runs):
            title = f"Clients of {section.panel}"
            columns = _clients(section)
            made.append(_table(f"clients-{number}", title, (_CLIENTS,), section, columns, library))
    return made


def _section(metric: Primary, groups: list[Group]) -> Section:
    experiments = [same.runs[0].experiment for same in groups]
    fields = [{name: str(value) for name, value in asdict(e).items()} for e in experiments]
    differing = [
        name for name in fields[0] if name not in _OF_PANEL and len({values[name] for values in fields}) > 1
    ]
    panel = _panel(experiments[0], "" if "model" in differing else experiments[0].model)
    title = panel if metric == Primary() else f"{panel}, {metric.name}"
    ordered = sorted(zip(groups, experiments, strict=True), key=lambda pair: pair[0].rank, reverse=True)
    labels = _labels([e for _, e in ordered], differing)
    return Section(
        title,
        tuple(Series(label, title, same.runs) for label, (same, _) in zip(labels, ordered, strict=True)),
    )


def _labels(experiments: Sequence[Experiment], differing: Sequence[str]) -> list[str]:
    """The rows' names. Python objects that differ are told apart by their digests only if nothing else does."""
    labels = [_label(e, [name for name in differing if name != "objects"]) for e in experiments]
    if len(set(labels)) == len(labels):
        return labels
    held = [digests(without_weights(e.objects) or "") for e in experiments]
    parts = [part for part in held[0] if len({own.get(part) for own in held}) > 1]
    return [
        ", ".join([label, *(f"{part} {own[part]}" for part in parts if part in own)])
        for label, own in zip(labels, held, strict=True)
    ]


def _label(experiment: Experiment, differing: Iterable[str]) -> str:
    """The method, and the fields that differ within the section."""
    own = [name for name in differing if not _is_in_label(name, experiment)]
    words = [word_of(name, getattr(experiment, name)) for name in own]
    return ", ".join([label_of(replace(experiment, validation=0.0)), *filter(None, words)])


def _is_in_label(name: str, experiment: Experiment) -> bool:
    """Whether `label_of` names the field."""
    if name == "gamma":
        return experiment.scheme != "lowrank"
    if name == "share":
        return experiment.scheme == "original"
    return name in ("scheme", "algorithm", "link_up")


def _results(section: Section) -> list[Column]:
    metric, unit = section.metric, section.unit
    seeds = {run.path: len(one.runs) for one in section.series for run in one.runs}

    def score(run: Summary) -> float | None:
        return None if run.final is None else metric.scaled(run.final)

    def sent_to(target: float) -> Callable[[Summary], float | None]:
        def measure(run: Summary) -> float | None:
            line = run.reached(target)
            return (line["total_up"] + line["total_down"]) / unit.bytes if line else None

        return measure

    return [
        Column(metric.title, score, "%" if metric.unit else "4", spread=True),
        *_others(section),
        Column("seeds", lambda run: float(seeds[run.path]), "n"),
        Column("rounds", lambda run: float(run.rounds)),
        Column(f"{unit.name} sent", lambda run: (run.bytes_up + run.bytes_down) / unit.bytes),
        *(
            Column(f"{unit.name} to {_target_text(metric, target)}", sent_to(target), spread=True, aimed=True)
            for target in section.targets
        ),
        Column("epsilon", lambda run: run.privacy["epsilon"] if run.privacy else None, missing=NO_NUMBER),
        Column("delta", lambda run: run.privacy["delta"] if run.privacy else None, missing=NO_NUMBER),
        Column("seconds", lambda run: run.seconds if run.timing else None),
    ]


def _others(section: Section) -> list[Column]:
    """A column for each metric beside the primary one."""

    def of(metric: Primary) -> Callable[[Summary], float | None]:
        def measure(run: Summary) -> float | None:
            value = None if run.everyone else run.others.get(metric.name)  # those are scores of other models
            return None if value is None else metric.scaled(value)

        return measure

    metrics = [Primary(name) for name in dict.fromkeys(name for run in section.runs for name in run.others)]
    return [Column(one.title, of(one), "%" if one.unit else "4", spread=True) for one in metrics]


def _clients(section: Section) -> list[Column]:
    metric = section.metric

    def of(key: str) -> Callable[[Summary], float | None]:
        def measure(run: Summary) -> float | None:
            value = (run.everyone or {}).get(key)
            return None if value is None else metric.scaled(float(value))

        return measure

    style = "%" if metric.unit else "4"
    scores = {"mean": "accuracy", "worst tenth": "worst_tenth", "standard deviation": "spread"}
    unit = " [%]" if metric.unit else ""
    return [
        *(Column(name + unit, of(key), style, spread=True) for name, key in scores.items()),
        Column("clients", lambda run: float(run.everyone["clients"]) if run.everyone else None, "n"),
    ]


def _table(
    name: str, title: str, notes: tuple[str, ...], section: Section, columns: list[Column], library: Library
) -> Table:
    found = [(one, column, _entry(one, column, library)) for one in section.series for column in columns]
    used = {column.name for _, column, entry in found if entry.value is not None or entry.aimed}
    kept = [(one, column, entry) for one, column, entry in found if column.name in used]
    cells = tuple(
        Cell(entry.row, column.name, None, (one.runs[0].experiment,), column.measure, column.style)
        for one, column, entry in kept
    )
    study = Study(name, title, "", cells, notes, spread="ci95", figure="none")
    return Table(study, tuple(entry for _, _, entry in kept))


def _entry(series: Series, column: Column, library: Library) -> Entry:
    values = tuple(value for run in series.runs if (value := column.measure(run)) is not None)
    found = Mean.of(values)
    return Entry(
        series.label,
        column.name,
        None,
        found.value if found else None,
        found.half if found and column.spread else None,
        column.style,
        (Sample(values, len(series.runs)),),
        tuple(map(library.name_of, series.runs)),
        aimed=column.aimed,
        missing=column.missing,
    )


def _notes(section: Section) -> tuple[str, ...]:
    runs = section.runs
    return tuple(
        text
        for text, holds in (
            (_LENGTHS, any(len({run.rounds for run in one.runs}) > 1 for one in section.series)),
            (_EVERYONE, any(run.everyone for run in runs)),
            (_COHORT, any(run.of_cohort and not run.everyone for run in runs)),
            (_SEEDED, any(run.privacy and not run.privacy["private"] for run in runs)),
            (_REACHED, section.targets and all(run.experiment.target is None for run in runs)),
        )
        if holds
    )


def _common_target(section: Section) -> list[float]:
    """The smallest of the runs' best scores, rounded to whole percents or two digits so that every run reaches it."""
    metric = section.metric
    best = [
        max(scores, key=metric.rank)
        for run in section.runs
        if (scores := [score for line in run.metrics if (score := score_of(line)) is not None])
    ]
    if len(section.series) < 2 or len(best) < len(section.runs):
        return []
    worst = min(best, key=metric.rank)
    digits = 2 if metric.unit else 1 - math.floor(math.log10(abs(worst) or 1.0))
    toward = math.floor if metric.higher_is_better else math.ceil
    return [toward(worst * 10**digits) / 10**digits]


def _target_text(metric: Primary, target: float) -> str:
    return f"{metric.scaled(target):g}{metric.unit}"
