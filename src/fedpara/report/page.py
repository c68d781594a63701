"""The report page: one HTML file with tables, curves and configs, which works offline.

The page contains the numbers as JSON. `assets/` has its style and its scripts, which draw the SVG.
"""

import json
from dataclasses import asdict
from importlib.resources import files
from statistics import mean
from typing import Any

from fedpara.experiments import Summary
from fedpara.experiments.paper import measures
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.storage.environment import read_environment
from fedpara.report.series import Series, aligned, all_series, final_accuracy, points
from fedpara.report.tables import NOT_RUN, TO_RUN_AGAIN, Entry, Table

MOST_POINTS = 400
PROGRAMS = ("chart.js", "page.js")


def page(library: Library, tables: list[Table]) -> str:
    """The HTML page of these runs and tables."""
    runs = list(library)
    series = [one for one in all_series(runs) if any(points(run).rounds for run in one.runs)]
    content = {
        "tables": [_table(table) for table in tables],
        "series": [_series(one, library, tables) for one in series],
        "groups": _groups(series, library, tables),
        "runs": {library.name_of(run): _run(run) for run in runs},
    }
    # "</script>" would end the script element too early, and "<!--<script>" would keep it open.
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    text = _asset("page.html").replace("/* style */", _asset("page.css"))
    text = text.replace("/* programs */", "\n".join(map(_asset, PROGRAMS)))
    return text.replace("/* data */", data)


def _asset(name: str) -> str:
    return (files("fedpara.report") / "assets" / name).read_text(encoding="utf-8")


def _table(table: Table) -> dict[str, Any]:
    study = table.study
    rows = []
    for row in study.rows:
        cells: list[dict[str, Any] | None] = []
        for column in study.columns:
            entry = table.at(row, column)
            if entry is None:
                cells.append(None)
                continue
            state = "computed" if entry.computed else "run"
            if entry.value is None:
                state = "missing" if entry.text in (NOT_RUN, TO_RUN_AGAIN) else "unreached"
            shown = {"paper": entry.paper_text, "ours": entry.text, "state": state, "runs": list(entry.runs)}
            cells.append(shown | _numbers(entry))
        rows.append({"name": row, "cells": cells})
    source, notes = study.source, list(study.notes)
    if table.caveat:
        source, notes = f"{source}; {table.caveat}", [f"{table.caveat}.", *notes]
    head = {"name": study.name, "title": study.title, "source": source, "notes": notes}
    return {**head, "columns": study.columns, "rows": rows, "filled": table.run}


def _numbers(entry: Entry) -> dict[str, float]:
    """Our accuracy and the paper's as numbers, for the dot plots."""
    if entry.style != "%" or entry.value is None:
        return {}
    found = {"value": round(entry.value, 3), "spread": round(entry.spread or 0.0, 3)}
    return found | ({"number": entry.paper} if isinstance(entry.paper, float) else {})


def _groups(series: list[Series], library: Library, tables: list[Table]) -> list[dict[str, Any]]:
    """The series of each study by number, with labels that are unique in the study; at the end, all series."""
    numbers = {one.runs[0].path: number for number, one in enumerate(series)}
    groups = []
    for table in tables:
        names = {name for entry in table.entries for name in entry.runs}
        own = [one for one in series if names & set(map(library.name_of, one.runs))]
        labelled = all_series(run for one in own for run in one.runs)
        members = [[numbers[one.runs[0].path], one.label] for one in labelled]
        if len(members) > 1:
            groups.append({"name": table.study.title, "members": members})
    everything = [[number, one.label] for number, one in enumerate(series)]
    return [*groups, {"name": "All runs", "members": everything}]


def _series(series: Series, library: Library, tables: list[Table]) -> dict[str, Any]:
    """The mean and range over seeds, at the rounds that all seeds have."""
    each = aligned(series.runs)
    first, several = each[0], len(each) > 1
    chosen = _thinned(len(first.rounds))

    def column(pick: Any, digits: int) -> list[float]:
        return [round(pick(i), digits) for i in chosen]

    return {
        "panel": series.panel,
        "original": series.original,
        "score": "Validation" if series.runs[0].experiment.validation else "Test",
        "runs": [library.name_of(run) for run in series.runs],
        "paper": _paper(series, library, tables),
        "rounds": [first.rounds[i] for i in chosen],
        "accuracy": column(lambda i: mean(one.accuracy[i] for one in each), 3),
        "low": column(lambda i: min(one.accuracy[i] for one in each), 3) if several else [],
        "high": column(lambda i: max(one.accuracy[i] for one in each), 3) if several else [],
        "gigabytes": column(lambda i: first.gigabytes[i], 5),
        "megabits": column(lambda i: first.megabits[i], 4),
        "compute": column(lambda i: first.compute[i], 3),
    }


def _paper(series: Series, library: Library, tables: list[Table]) -> dict[str, float] | None:
    """The paper's accuracy for this experiment, and its number of rounds."""
    names = set(map(library.name_of, series.runs))
    for table in tables:
        for cell, entry in zip(table.study.cells, table.entries, strict=True):
            if (
                cell.measure is measures.accuracy
                and isinstance(cell.paper, float)
                and names & set(entry.runs)
            ):
                return {"accuracy": cell.paper, "round": cell.experiments[0].rounds}
    return None


def _thinned(count: int) -> list[int]:
    """At most MOST_POINTS evenly spaced indices, including the last."""
    step = -(-count // MOST_POINTS)
    return sorted({*range(0, count, step), count - 1})


def _run(run: Summary) -> dict[str, Any]:
    accuracy = final_accuracy(run)
    return {
        "config": {name: value for name, value in asdict(run.experiment).items() if value not in (None, {})},
        "environment": read_environment(run.path),
        "rounds": run.rounds,
        "accuracy": None if accuracy is None else round(accuracy, 3),
        "validation": run.experiment.validation > 0,
        "gigabytes": round((run.bytes_up + run.bytes_down) / 2**30, 4),
        "seconds": round(run.seconds, 1),
        "evaluations": len(points(run).rounds),
    }
