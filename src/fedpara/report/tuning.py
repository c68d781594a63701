"""Tables of tuned methods: every trial with its validation score, and the chosen settings on the test set."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Literal

from fedpara.experiments.paper import Cell, Study
from fedpara.experiments.paper.measures import GIGABYTE, after, before
from fedpara.experiments.paper.study import Measure
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.sweep import text_of
from fedpara.report.own import Unit
from fedpara.report.tables import Entry, Sample, Table, spread_of
from fedpara.report.tuned_studies import Method, TunedStudy

TUNED = "Settings are tuned by validation, and final runs use other seeds."


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
        scores = list(_scores(method).values())
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
        if study.first.personal:
            cells += [_personal(method, measure, names, spread) for measure in (before, after)]
        if sent:
            cells.append(_number(method.title, f"{unit.name} sent", mean(sent), "g", names))
    title = f"Tuned methods: {study.title}"
    return _table(f"tuned-{study.name}", title, cells, _final_notes(study), spread)


def _personal(
    method: Method, measure: Measure, names: tuple[str, ...], spread: Literal["std", "ci95"]
) -> Entry:
    """The accuracy before or after the local training of the last scored round."""
    scores = [score for run in method.finals if (score := measure(run)) is not None]
    return Entry(
        method.title,
        f"{measure.__name__} local training [%]",
        None,
        mean(scores) if scores else None,
        spread_of(scores, spread),
        "%",
        (Sample(tuple(scores), len(scores)),),
        names,
        trials=len(method.outcomes),
    )


def trials_table(study: TunedStudy, library: Library) -> Table:
    """Every trial's validation score: one column per method. The best one of each is marked."""
    columns = {method.title: method for method in study.methods}
    cells = []
    for number in sorted({one.trial.number for method in study.methods for one in method.outcomes}):
        there = {
            title: outcome
            for title, method in columns.items()
            for outcome in method.outcomes
            if outcome.trial.number == number
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
    return _table(f"trials-{study.name}", f"Trials: {study.title}", cells, _trial_notes(study), "std")


def _best_word(method: Method) -> str:
    return "chosen" if method.finals else "best"


def _number(row: str, column: str, value: float | None, style: str, runs: tuple[str, ...] = ()) -> Entry:
    """An entry for a single number, such as a trial's score."""
    # A run without a score has diverged or is not finished.
    sample = Sample((), 1) if value is None else Sample((float(value),), 0)
    return Entry(row, column, None, value, None, style, (sample,), runs)


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
    some = "" if study.has_all_seeds else ", but not every trial has all of them yet"
    notes = [
        f"Validation {metric.title} after {e.rounds} rounds, seed {', '.join(map(str, seeds))}{some}. "
        f"{100 * e.validation:g}% of every client's training examples are held out and scored."
    ]
    notes += [f"The base is {base}."] if (base := _base(study)) else []
    chosen = [m.choice.chosen for m in study.methods if m.choice]
    errors = [metric.scaled(one.standard_error) for one in chosen if one.standard_error is not None]
    if errors:
        notes.append(f"The standard error of a score is about {max(errors):.2g}.")
    return tuple(notes)


def _base(study: TunedStudy) -> str:
    """The values of trial 0 that other trials change, if each changes only one. Those of single methods come last."""
    if any(method.outcomes[0].trial.values for method in study.methods):
        return ""
    names = sorted({name for m in study.methods for one in m.outcomes for name in one.trial.values})
    each = {}
    for method in study.methods:
        first = method.outcomes[0].trial.experiment
        each[method.title] = [
            f"{name}={text_of(value)}" for name in names if (value := getattr(first, name)) is not None
        ]
    words = dict.fromkeys(word for own in each.values() for word in own)
    common = [word for word in words if all(word in own for own in each.values())]
    own = [f"{title}: {word}" for title, own in each.items() for word in own if word not in common]
    return "; ".join([", ".join(common), *own])


def _final_notes(study: TunedStudy) -> tuple[str, ...]:
    notes = [
        f'The table "Trials: {study.title}" has every trial. The ± of a validation score is its standard error.'
    ]
    if study.first.personal:
        notes.append("The test accuracy is that of each client's own model after the last aggregation.")
    if not study.is_fair:
        notes.append(
            "The methods do not have equally many trials with equally many seeds yet, so no other table uses their "
            "final runs."
        )
    notes += _differences(study)
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


def _differences(study: TunedStudy) -> list[str]:
    """FedPara's test score minus that of each other method, over the seeds that both have."""
    ours = next((method for method in study.methods if method.name in ("fedpara", "pfedpara")), None)
    if ours is None:
        return []
    found = []
    for other in study.methods:
        theirs = _scores(other)
        points = [score - theirs[seed] for seed, score in _scores(ours).items() if seed in theirs]
        if other is not ours and len(points) > 1:
            found.append(f"{other.title} {mean(points):+.2f} ± {stdev(points):.2f}")
    return (
        [f"{ours.title} minus others in the test score, seed by seed: {', '.join(found)}."] if found else []
    )


def _scores(method: Method) -> dict[int, float]:
    """Test scores by seed."""
    return {
        run.experiment.seed: run.metric.scaled(run.final) for run in method.finals if run.final is not None
    }
