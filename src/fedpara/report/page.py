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
from fedpara.experiments.paper.measures import GIGABYTE
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.storage.environment import read_environment
from fedpara.report.own import INTERVAL, NO_ROUND, Section, Unit
from fedpara.report.series import Series, aligned, all_series, curve, final_accuracy, points
from fedpara.report.tables import NOT_RUN, STYLES, TO_RUN_AGAIN, Entry, Table
from fedpara.report.tuning import TUNED, is_tuned

MOST_POINTS = 400
PAPER_UNIT = Unit("GB", GIGABYTE)
PAPER = {
    "name": "FedPara: the paper and our runs",
    "heading": "FedPara",
    "lead": "The tables and curves of the paper beside our runs.",
    "hint": "The paper's numbers are grey, ours are beside them. In the dot plots, diamonds are the paper's and dots "
    "are ours. Click one of our numbers to see its runs. ± is over seeds.",
    "band": "Bands show the range over seeds.",
    "interval": False,
}
OWN = {
    "name": "Runs of fedpara",
    "heading": "Runs",
    "lead": "",
    "hint": f"The best setting is first. {INTERVAL} Click a number to see its runs.",
    "band": "Lines are means over seeds, and bands are their 95% confidence intervals.",
    "interval": True,
}
PROGRAMS = ("chart.js", "page.js")


def page(library: Library, tables: list[Table]) -> str:
    """The HTML page of the paper's tables and these runs."""
    series = [one for one in all_series(library) if any(points(run).rounds for run in one.runs)]
    return _html(
        {
            "texts": {**PAPER, "hint": f"{PAPER['hint']} {TUNED}"} if any(map(is_tuned, tables)) else PAPER,
            "tables": [_table(table) for table in tables],
            "series": [_series(one, library, tables) for one in series],
            "groups": _groups(series, library, tables),
            "runs": {library.name_of(run): _run(run, final_accuracy(run), PAPER_UNIT) for run in library},
            "unit": PAPER_UNIT.name,
        }
    )


def own_page(library: Library, tables: list[Table], sections: list[Section]) -> str:
    """The HTML page of runs that are not the paper's."""
    drawn = [(section, one) for section in sections for one in section.series if curve(one.runs)]
    unit = Unit.of(max(run.bytes_up + run.bytes_down for run in library))
    count, settings = sum(1 for _ in library), sum(len(section.series) for section in sections)
    lead = f"{count} run{'s' * (count != 1)} of {settings} setting{'s' * (settings != 1)}."
    lead = lead if sections else NO_ROUND
    return _html(
        {
            "texts": {**OWN, "lead": lead},
            "tables": [_table(table) for table in tables],
            "series": [_own_series(one, section, library) for section, one in drawn],
            "groups": [{"name": "All runs", "members": [[i, one.label] for i, (_, one) in enumerate(drawn)]}],
            "runs": {library.name_of(run): _run(run, _final(run), unit) for run in library},
            "unit": unit.name,
        }
    )


def _html(content: dict[str, Any]) -> str:
    # "</script>" would end the script element too early; "<!--<script>" would keep it open.
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
    return {**head, "paper": table.of_paper, "columns": study.columns, "rows": rows, "filled": table.run}


def _numbers(entry: Entry) -> dict[str, float]:
    """Our score and the paper's as numbers, for the dot plots. Only fractions are plotted."""
    if entry.style != "%" or entry.value is None:
        return {}
    found = {"value": round(entry.value, 3), "spread": round(entry.spread or 0.0, 3)}
    return found | ({"number": entry.paper} if isinstance(entry.paper, float) else {})


def _groups(series: list[Series], library: Library, tables: list[Table]) -> list[dict[str, Any]]:
    """The series of each study by number, with labels that are unique in the study; at the end, all series."""
    numbers = {one.runs[0].path: number for number, one in enumerate(series)}
    groups = []
    for table in sorted(tables, key=lambda table: not table.of_paper):  # the paper's first
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
        **_described(series, PAPER_UNIT),
        "runs": [library.name_of(run) for run in series.runs],
        "paper": _paper(series, library, tables),
        "rounds": [first.rounds[i] for i in chosen],
        "mean": column(lambda i: mean(one.score[i] for one in each), 3),
        "low": column(lambda i: min(one.score[i] for one in each), 3) if several else [],
        "high": column(lambda i: max(one.score[i] for one in each), 3) if several else [],
        "sent": column(lambda i: first.sent[i] / GIGABYTE, 5),
        "megabits": column(lambda i: first.megabits[i], 4),
        "compute": column(lambda i: first.compute[i], 3),
    }


def _own_series(series: Series, section: Section, library: Library) -> dict[str, Any]:
    """The mean over seeds with its 95% interval, at the rounds that all seeds have."""
    line = curve(series.runs)
    chosen = [line[i] for i in _thinned(len(line))]
    several = chosen[0].score.half is not None
    return {
        "panel": section.panel,
        "original": False,
        **_described(series, section.unit),
        "runs": [library.name_of(run) for run in series.runs],
        "paper": None,
        "rounds": [point.round for point in chosen],
        "mean": [_rounded(point.score.value) for point in chosen],
        "low": [_rounded(point.score.low) for point in chosen] if several else [],
        "high": [_rounded(point.score.high) for point in chosen] if several else [],
        "sent": [_rounded(point.sent / section.unit.bytes) for point in chosen],
        "megabits": [_rounded(point.megabits) for point in chosen],
        "compute": [_rounded(point.compute) for point in chosen],
    }


def _final(run: Summary) -> float | None:
    return None if run.final is None else run.metric.scaled(run.final)


def _described(series: Series, unit: Unit) -> dict[str, Any]:
    metric = series.metric
    return {
        "scored": "Validation" if series.runs[0].experiment.validation else "Test",
        "metric": {"name": metric.name, "percent": bool(metric.unit), "higher": metric.higher_is_better},
        "unit": unit.name,
    }


def _rounded(value: float) -> float:
    """Six significant digits keep the page small."""
    return float(f"{value:.6g}")


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


def _run(run: Summary, score: float | None, unit: Unit) -> dict[str, Any]:
    """`score` is in %, if the metric is a fraction."""
    style, name = ("%", "") if run.metric.unit else ("4", f"{run.metric.name} ")
    held_out = " (validation)" * (run.experiment.validation > 0)
    return {
        "config": {name: value for name, value in asdict(run.experiment).items() if value not in (None, {})},
        "environment": read_environment(run.path),
        "rounds": run.rounds,
        "score": None if score is None else f"{name}{STYLES[style](score)}{run.metric.unit}{held_out}",
        "sent": STYLES["4"]((run.bytes_up + run.bytes_down) / unit.bytes),
        "seconds": round(run.seconds, 1),
        "evaluations": len(points(run).rounds),
    }
