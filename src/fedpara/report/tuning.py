"""Tables of tuned methods: every trial with its validation score, and the chosen settings on the test set.

Run folders are recognized by where they lie:

    tuning/STUDY/STUDY-METHOD-K    final/STUDY/METHOD-seedS      archived runs, as in results/
    STUDY/trials/METHOD-K-seedS    STUDY/final/METHOD-seedS      a folder of `fedpara tune`
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from fedpara.experiments import Experiment, Summary
from fedpara.experiments.config import FREE
from fedpara.experiments.paper import Cell, Study
from fedpara.experiments.paper.measures import GIGABYTE
from fedpara.experiments.paper.sizes import EXAMPLES
from fedpara.experiments.seeds import Group
from fedpara.experiments.storage.catalog import Library, finished
from fedpara.experiments.studies.sweep import text_of
from fedpara.experiments.studies.trials import Choice, Outcome, Trial
from fedpara.report.own import Unit
from fedpara.report.series import data_of
from fedpara.report.tables import Entry, Replacement, Sample, Table, spread_of

TUNED = "Settings are tuned by validation, and final runs use other seeds."
TITLES = {"original": "original", "lowrank": "low-rank", "fedpara": "FedPara", "narrow": "narrow dense VGG16"}
"""How the tables name the methods of the paper's studies, in this order."""
_TRIAL = re.compile(r"(?P<method>.+?)-(?P<number>\d+)(?:-seed\d+)?")
_FINAL = re.compile(r"(?P<method>.+)-seed\d+")
_SAME = ("seed", "validation", "evaluate_every", *FREE)
"""Fields in which a final run may differ from its trial."""


@dataclass(frozen=True)
class Method:
    """`finals` are the finished final runs of the chosen setting, and `strays` those of another setting."""

    name: str
    outcomes: tuple[Outcome, ...]
    runs: tuple[Summary, ...]

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    @cached_property
    def choice(self) -> Choice | None:
        return Choice.of(self.outcomes)

    @property
    def finals(self) -> tuple[Summary, ...]:
        return tuple(run for run in self.runs if self._is_chosen(run.experiment))

    @property
    def strays(self) -> tuple[Summary, ...]:
        return tuple(run for run in self.runs if not self._is_chosen(run.experiment))

    def _is_chosen(self, experiment: Experiment) -> bool:
        if self.choice is None:
            return False
        return _setting(experiment) == _setting(self.choice.chosen.trial.experiment)


@dataclass(frozen=True)
class TunedStudy:
    """The methods that were tuned on the same data."""

    name: str
    methods: tuple[Method, ...]

    @property
    def first(self) -> Experiment:
        return self.methods[0].outcomes[0].trial.experiment

    @property
    def numbers(self) -> list[int]:
        """The number of finished trials of each method."""
        return [sum(one.score is not None for one in method.outcomes) for method in self.methods]


def _setting(experiment: Experiment) -> dict[str, Any]:
    return {name: value for name, value in asdict(experiment).items() if name not in _SAME}


def tuned_studies(library: Iterable[Summary]) -> list[TunedStudy]:
    """The studies that have trials, in the order of their runs."""
    trials: dict[Path, dict[str, dict[int, list[Summary]]]] = {}
    finals: dict[Path, dict[str, list[Summary]]] = {}
    for run in library:
        place = _place(run.path)
        if place is None:
            continue
        study, method, number = place
        if number is not None:
            trials.setdefault(study, {}).setdefault(method, {}).setdefault(number, []).append(run)
        elif finished(run, run.experiment.rounds) and not run.experiment.validation:
            finals.setdefault(study, {}).setdefault(method, []).append(run)
    order = [*TITLES]
    found = []
    for study, methods in trials.items():
        names = sorted(methods, key=lambda name: order.index(name) if name in order else len(order))
        found.append(
            TunedStudy(
                study.name,
                tuple(
                    Method(
                        name, _outcomes(name, methods[name]), _by_seed(finals.get(study, {}).get(name, []))
                    )
                    for name in names
                ),
            )
        )
    return found


def _place(path: Path) -> tuple[Path, str, int | None] | None:
    """(study, method, number of the trial or None for a final run), or None for another run."""
    parent, above = path.parent, path.parent.parent
    if above.name == "tuning":
        study, name, kind = above.parent / parent.name, path.name.removeprefix(f"{parent.name}-"), _TRIAL
        if name == path.name:
            return None
    elif above.name == "final":
        study, name, kind = above.parent / parent.name, path.name, _FINAL
    elif parent.name in ("trials", "final"):
        study, name, kind = above, path.name, _TRIAL if parent.name == "trials" else _FINAL
    else:
        return None
    fits = kind.fullmatch(name)
    return (study, fits["method"], int(fits["number"]) if kind is _TRIAL else None) if fits else None


def _by_seed(runs: Sequence[Summary]) -> tuple[Summary, ...]:
    return tuple(sorted(runs, key=lambda run: run.experiment.seed))


def _outcomes(method: str, runs: Mapping[int, Sequence[Summary]]) -> tuple[Outcome, ...]:
    numbers = sorted(runs)
    varied = _varied([runs[number][0].experiment for number in numbers])
    return tuple(
        Outcome(
            Trial(method, number, values, runs[number][0].experiment),
            Group(tuple(run for run in _by_seed(runs[number]) if finished(run, run.experiment.rounds))),
            len(runs[number]),
            _held_out(runs[number][0].experiment),
        )
        for number, values in zip(numbers, varied, strict=True)
    )


def _varied(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """The values that name each trial: those that differ from the first trial if it is one each, else all."""
    settings = [_setting(experiment) for experiment in experiments]
    first = settings[0]
    changed = [{name: v for name, v in own.items() if v != first[name]} for own in settings]
    if all(len(values) == 1 for values in changed[1:]):
        return changed
    names = sorted({name for values in changed for name in values})
    return [{name: own[name] for name in names} for own in settings]


def _held_out(experiment: Experiment) -> int | None:
    """About how many examples the score is from, if the data set is one of the paper's."""
    count = EXAMPLES.get(experiment.dataset)
    known = count and experiment.keep is None and not experiment.personal
    return round(count * experiment.data_fraction * experiment.validation) if known and count else None


def replacements(studies: Iterable[TunedStudy]) -> dict[str, Replacement]:
    """By the identity of every tried setting: the chosen one, which has final runs."""
    return {
        replace(outcome.trial.experiment, validation=0.0, seed=0).identity: Replacement(
            method.finals[0].experiment,
            tuple(run.experiment.seed for run in method.finals),
            len(method.outcomes),
        )
        for study in studies
        for method in study.methods
        if method.finals
        for outcome in method.outcomes
    }


def is_tuned(table: Table) -> bool:
    """Whether the table is of tuned methods."""
    return table.study.name.startswith("tuned-")


def with_tuned(tables: Sequence[Table], studies: Sequence[TunedStudy], library: Library) -> list[Table]:
    """The paper's tables between the tuned methods and their trials."""
    unit = Unit("GB", GIGABYTE)
    finals = (final_table(study, library, unit, "std") for study in studies)
    return [*finals, *tables, *(trials_table(study, library) for study in studies)]


def final_table(
    study: TunedStudy, library: Library, unit: Unit, spread: Literal["std", "ci95"] = "ci95"
) -> Table:
    """One row per method: its trials, the chosen one, and the test score of the final runs."""
    cells = []
    for method in study.methods:
        names = tuple(map(library.name_of, method.finals))
        cells.append(_number(method.title, "trials", len(method.outcomes), "n"))
        if method.choice is None:
            continue
        chosen = method.choice.chosen
        metric, style = chosen.group.metric, "%" if chosen.group.metric.unit else "4"
        error = chosen.standard_error
        scores = [metric.scaled(run.final) for run in method.finals if run.final is not None]
        sent = [(run.bytes_up + run.bytes_down) / unit.bytes for run in method.finals]
        cells += [
            replace(
                _number(
                    method.title, f"validation {metric.title}", metric.scaled(chosen.score or 0.0), style
                ),
                spread=None if error is None else metric.scaled(error),
                runs=tuple(map(library.name_of, chosen.group.runs)),
                note=f" ({chosen.trial.label})",
            ),
            Entry(
                method.title,
                f"test {metric.title}",
                None,
                mean(scores) if scores else None,
                spread_of(scores, spread),
                style,
                (Sample(tuple(scores), len(scores)),),
                names,
                trials=len(method.outcomes),
            ),
        ]
        if sent:
            cells.append(_number(method.title, f"{unit.name} sent", mean(sent), "g", names))
    title = f"Tuned methods: {data_of(study.first)}"
    return _table(f"tuned-{study.name}", title, cells, _final_notes(study), spread)


def trials_table(study: TunedStudy, library: Library) -> Table:
    """Every trial's validation score: one column per method. The best one of each is marked."""
    count = max(len(method.outcomes) for method in study.methods)
    columns = {method.title: method for method in study.methods}
    cells = []
    for number in range(count):
        there = {
            title: method.outcomes[number]
            for title, method in columns.items()
            if number < len(method.outcomes)
        }
        labels = {outcome.trial.label for outcome in there.values()}
        row = labels.copy().pop() if len(labels) == 1 else f"trial {number}"
        for title, outcome in there.items():
            choice, metric = columns[title].choice, outcome.group.metric
            best = choice is not None and outcome is choice.chosen
            own = [outcome.trial.label] * (len(labels) > 1) + [_best_word(columns[title])] * best
            runs = tuple(map(library.name_of, outcome.group.runs))
            style = "%" if metric.unit else "4"
            value = None if outcome.score is None else metric.scaled(outcome.score)
            entry = _number(row, title, value, style, runs)
            cells.append(replace(entry, note=f" ({', '.join(own)})" if own else "", chosen=best))
    return _table(
        f"trials-{study.name}", f"Trials: {data_of(study.first)}", cells, _trial_notes(study), "std"
    )


def _best_word(method: Method) -> str:
    return "chosen" if method.finals else "best"


def _number(row: str, column: str, value: float | None, style: str, runs: tuple[str, ...] = ()) -> Entry:
    """An entry that is no mean over seeds of final runs."""
    values = () if value is None else (float(value),)
    return Entry(row, column, None, values[0] if values else None, None, style, (Sample(values, 0),), runs)


def _table(
    name: str, title: str, entries: Sequence[Entry], notes: tuple[str, ...], spread: Literal["std", "ci95"]
) -> Table:
    cells = tuple(Cell(e.row, e.column, None, (), lambda: None, e.style) for e in entries)
    study = Study(name, title, "Not in the paper", cells, notes, spread=spread, figure="none")
    return Table(study, tuple(entries))


def _trial_notes(study: TunedStudy) -> tuple[str, ...]:
    e, outcome = study.first, study.methods[0].outcomes[0]
    seeds = sorted({run.experiment.seed for m in study.methods for o in m.outcomes for run in o.group.runs})
    metric = outcome.group.metric
    notes = [
        f"Validation {metric.title} after {e.rounds} rounds, seed {', '.join(map(str, seeds))}. "
        f"{100 * e.validation:g}% of every client's training examples are held out and scored."
    ]
    notes += [f"The base is {base}."] if (base := _base(study)) else []
    chosen = [m.choice.chosen for m in study.methods if m.choice]
    errors = [metric.scaled(one.standard_error) for one in chosen if one.standard_error is not None]
    if errors:
        notes.append(f"The standard error of a score is about {max(errors):.2g}.")
    if len(set(study.numbers)) > 1:
        notes.append("The methods do not have equally many finished trials yet.")
    return tuple(notes)


def _base(study: TunedStudy) -> str:
    """The values of trial 0 that the other trials change, if each changes one. Those of single methods come last."""
    if any(method.outcomes[0].trial.values for method in study.methods):
        return ""
    each = {}
    for method in study.methods:
        first = method.outcomes[0].trial.experiment
        names = sorted({name for one in method.outcomes for name in one.trial.values})
        each[method.title] = [
            f"{name}={text_of(value)}" for name in names if (value := getattr(first, name)) is not None
        ]
    words = dict.fromkeys(word for own in each.values() for word in own)
    common = [word for word in words if all(word in own for own in each.values())]
    own = [f"{title}: {word}" for title, own in each.items() for word in own if word not in common]
    return "; ".join([", ".join(common), *own])


def _final_notes(study: TunedStudy) -> tuple[str, ...]:
    data = data_of(study.first)
    notes = [
        f'The table "Trials: {data}" has every trial. The ± of a validation score is its standard error.'
    ]
    for method in study.methods:
        if method.choice and method.choice.ties:
            labels = "; ".join(one.trial.label for one in method.choice.ties)
            notes.append(f"{method.title}: within one standard error of the best trial: {labels}.")
        if method.strays:
            count = len(method.strays)
            have = "final runs have" if count > 1 else "final run has"
            notes.append(
                f"{method.title}: {count} {have} another setting than the best trial and do not count."
            )
    return tuple(notes)
