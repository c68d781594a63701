"""The runs that no table of the paper uses, as one more table: one row per series."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from fedpara.experiments import Summary
from fedpara.experiments.paper import Cell, Study
from fedpara.experiments.paper.measures import GIGABYTE
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.frontier.study import belongs
from fedpara.report.series import Series, all_series, final_accuracy
from fedpara.report.tables import Entry, Sample, Table, spread_of

OTHERS = "Other runs"
OF_COHORT = (
    "Runs of personal models are to be run again if they have only the scores of each round's cohort: the last of "
    "these is the mean over a few clients, not over all."
)
PRIVACY = "privacy"
"""privacy/DATA/STAGE/METHOD/EPSILON/NAME are runs of `benchmarks/privacy.py`; the guide to privacy has their table."""
COLUMNS: dict[str, tuple[Callable[[Summary], float | None], str]] = {
    "accuracy [%]": (final_accuracy, "%"),
    "rounds": (lambda run: float(run.rounds), "n"),
    "GB sent": (lambda run: (run.bytes_up + run.bytes_down) / GIGABYTE, "g"),
}


def other_runs(library: Library, tables: Sequence[Table]) -> Table | None:
    """The table, or None if the given tables use every started run. Leaves out runs that another page shows."""
    reported = {name for table in tables for entry in table.entries for name in entry.runs}
    # Labels from all runs, so that they also differ from those of the tables' runs.
    series = [
        replace(one, runs=left)
        for one in all_series(run for run in library if not _is_shown_elsewhere(run.path))
        if (left := tuple(run for run in one.runs if library.name_of(run) not in reported))
    ]
    if not series:
        return None
    found = [(one, _entry(one, column, library)) for one in series for column in COLUMNS]
    # A run has no accuracy before its first evaluation.
    scored = [(one, entry) for one, entry in found if entry.value is not None or entry.superseded]
    cells = (
        Cell(entry.row, entry.column, None, (one.runs[0].experiment,), *COLUMNS[entry.column])
        for one, entry in scored
    )
    notes = (OF_COHORT,) * any(entry.superseded for _, entry in scored)
    study = Study("runs", OTHERS, "Not in the paper", tuple(cells), notes)
    return Table(study, tuple(entry for _, entry in scored))


def _is_shown_elsewhere(run: Path) -> bool:
    return belongs(run) or run.parts[-6:-5] == (PRIVACY,)


def _entry(series: Series, column: str, library: Library) -> Entry:
    measure, style = COLUMNS[column]
    values = tuple(value for run in series.runs if (value := measure(run)) is not None)
    return Entry(
        f"{series.panel}, {series.label}",
        column,
        None,
        mean(values) if values else None,
        spread_of(values, "std") if style == "%" else None,
        style,
        (Sample(values, len(series.runs)),),
        tuple(library.name_of(run) for run in series.runs),
        superseded=measure is final_accuracy and not values and series.runs[0].of_cohort,
    )
