"""The work of `fedpara report`: turn run folders into a page, tables or figures."""

import os
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

from fedpara.choices import FORMATS
from fedpara.errors import UsageError
from fedpara.experiments.paper import STUDIES
from fedpara.experiments.storage.catalog import Library, is_run
from fedpara.experiments.studies.frontier.study import belongs
from fedpara.files import make_folder, write_bytes
from fedpara.report.document import document
from fedpara.report.figures import section_figure, study_figure
from fedpara.report.formats import csv_text, latex
from fedpara.report.frontier import draw, frontier_document, frontier_sections
from fedpara.report.others import other_runs
from fedpara.report.own import Unit, sections
from fedpara.report.own import tables as own_tables
from fedpara.report.own_formats import csv_text as own_csv
from fedpara.report.own_formats import document as own_document
from fedpara.report.page import own_page, page
from fedpara.report.tables import Table, table_of
from fedpara.report.tuned_studies import TunedStudy, replacements, tuned_studies
from fedpara.report.tuning import final_table, trials_table, with_tuned

ENDINGS = {
    "html": (".html", ".htm"),
    "markdown": (".md", ".markdown"),
    "csv": (".csv",),
    "latex": (".tex",),
}
"""The endings of each format. An existing file is replaced only if it has one of them."""

FIGURES = ("png", "svg", "pdf")

DEFAULT_OUT = {
    "markdown": "page.md",
    "csv": "page.csv",
    "latex": "page.tex",
    **dict.fromkeys(FIGURES, "figures"),
}


def report(runs: list[Path], out: Path | None, format_: str | None, scale: str) -> None:
    if out is None:
        out = Path(DEFAULT_OUT.get(format_ or "html", "page.html"))
    kind = format_ or {".md": "markdown", ".tex": "latex"}.get(out.suffix, out.suffix.removeprefix("."))
    if kind not in FORMATS:
        raise UsageError(
            f"unknown format {kind!r}: expected --format or an --out ending of {', '.join(FORMATS)}."
        )
    library = Library.of(*runs)
    if not library.runs:
        library.refuse_damaged("reported")
        raise UsageError(f"no run in {', '.join(map(str, runs))}: expected folders that `fedpara run` made.")
    _check_out(out, kind)
    make_folder(out if kind in FIGURES else out.parent)
    first = [run.path for run in library if run.path.is_relative_to(runs[0].resolve())]
    if kind in (*FIGURES, "markdown") and first and all(map(belongs, first)):
        _of_frontier(library, out, kind, runs)
        library.refuse_damaged("reported")
        return
    tuned = tuned_studies(library)
    chosen = replacements(tuned, scale)
    tabulate = partial(table_of, library=library, seeds=library.seeds, scale=scale, tuned=chosen)
    trained = [replace(s, cells=tuple(c for c in s.cells if c.experiments)) for s in STUDIES.values()]
    of, to = shlex.join(map(str, runs)), shlex.quote(str(out))
    if any(entry.runs or entry.superseded for study in trained for entry in tabulate(study).entries):
        _of_paper(library, [*map(tabulate, STUDIES.values())], tuned, out, kind, of, to)
    else:
        _of_own_runs(library, tuned, out, kind, of, to)
    library.refuse_damaged("reported")


def _of_paper(
    library: Library, tables: list[Table], tuned: list[TunedStudy], out: Path, kind: str, of: str, to: str
) -> None:
    tables = with_tuned(tables, tuned, library)
    rest = other_runs(library, tables) if kind != "html" else None  # the HTML page shows every run anyway
    if rest is not None:
        tables.append(rest)
    if kind in FIGURES:
        _figures(library, tables, out, kind)
        return
    text = {
        "html": lambda: page(library, tables),
        "markdown": lambda: document(tables, of, to),
        "csv": lambda: csv_text(tables),
        "latex": lambda: _all_latex(tables),
    }[kind]()
    _write(library, text, out)
    of_paper = [table for table in tables if table.of_paper]
    cells, filled = sum(len(table.entries) for table in of_paper), sum(table.run for table in of_paper)
    typer.echo(f"{filled} of the paper's {cells} cells have our number.")


def _of_frontier(library: Library, out: Path, kind: str, runs: list[Path]) -> None:
    """The page or the figures of `fedpara reproduce frontier`."""
    found = frontier_sections(library)
    if kind == "markdown":
        _write(library, frontier_document(found, shlex.join(map(str, runs)), shlex.quote(str(out))), out)
        return
    for section in found:
        typer.echo(str(draw(section, out / f"{section.name}.{kind}")))


def _of_own_runs(library: Library, tuned: list[TunedStudy], out: Path, kind: str, of: str, to: str) -> None:
    """A report without the paper's tables."""
    found = sections(library)
    unit = Unit.of(max(run.bytes_up + run.bytes_down for run in library))
    of_methods = [
        table for one in tuned for table in (final_table(one, library, unit), trials_table(one, library))
    ]
    tables = [*of_methods, *own_tables(found, library)]
    if kind in FIGURES:
        for number, section in enumerate(found, 1):
            path = section_figure(section, out / f"runs-{number}.{kind}")
            if path is not None:
                typer.echo(f"{path}: {section.panel}")
        return
    text = {
        "html": lambda: own_page(library, tables, found),
        "markdown": lambda: own_document(tables, sum(1 for _ in library), of, to),
        "csv": lambda: own_csv(tables, found),
        "latex": lambda: _all_latex(tables),
    }[kind]()
    _write(library, text, out)


def _all_latex(tables: list[Table]) -> str:
    return "\n\n".join(f"% {t.study.name}: {t.study.title}\n{latex(t)}" for t in tables) + "\n"


def _write(library: Library, text: str, out: Path) -> None:
    content = text.encode(errors="replace")  # a folder's name may not be valid UTF-8
    write_bytes(out, content)
    count = sum(1 for _ in library)
    typer.echo(f"{out}: {len(content) / 1e3:.0f} kB, {count} run{'s' * (count != 1)}")


def _check_out(out: Path, kind: str) -> None:
    """UsageError if writing to `out` could destroy a run's file or an unrelated one."""
    place = Path(os.path.realpath(out))
    inside = [str(folder) for folder in (place, *place.parents) if is_run(folder)]
    if inside:
        raise UsageError(f"{out} is inside the run folder {inside[0]}: choose another --out.")
    if kind in FIGURES and out.suffix == f".{kind}":
        raise UsageError(
            f"a report has several figures: give --out a folder, as in --out {out.stem} --format {kind}."
        )
    endings = ENDINGS.get(kind)
    if endings and os.path.lexists(out) and not os.path.isdir(out) and out.suffix.lower() not in endings:
        raise UsageError(f"{out} exists and does not end in {' or '.join(endings)}: choose another --out.")


def _figures(library: Library, tables: list[Table], out: Path, kind: str) -> None:
    for table in tables:
        names = {name for entry in table.entries for name in entry.runs}
        found = [run for run in library if library.name_of(run) in names]
        path = study_figure(table, found, out / f"{table.study.name}.{kind}")
        if path is not None:
            typer.echo(str(path))
