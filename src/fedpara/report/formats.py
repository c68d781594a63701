"""Tables as text: terminal, Markdown, CSV, LaTeX."""

import csv
import io
from collections.abc import Sequence

from fedpara.report.tables import Entry, Table

_LATEX = {
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "#": r"\#",
    "{": r"\{",
    "}": r"\}",
    "γ": r"$\gamma$",
    "λ": r"$\lambda$",
    "±": r"$\pm$",
    "$": r"\$",
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "×": r"$\times$",
}


def grid(table: Table) -> tuple[list[str], list[list[str]]]:
    """(headings, rows): a paper and an ours column for each column of the study; only ours if the paper has none."""
    study = table.study
    who = ("paper", "ours") if table.of_paper else ("ours",)
    headings = ["", *(f"{column}, {one}" for column in study.columns for one in who)]
    rows = []
    for row in study.rows:
        entries = [table.at(row, column) for column in study.columns]
        rows.append([row, *(text for entry in entries for text in _pair(entry)[-len(who) :])])
    return headings, rows


def plain(table: Table) -> str:
    """Aligned columns for a terminal. Each cell is paper | ours."""
    study = table.study
    head = ["", *(study.columns)]
    lines = [[row, *(_joined(table.at(row, column)) for column in study.columns)] for row in study.rows]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    text = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *lines]
    ]
    title = [f"{study.name}: {study.title} ({study.source}); paper | ours", *filter(None, [table.caveat])]
    return "\n".join([*title, *(line.rstrip() for line in text)])


def markdown(table: Table, bold: bool = True) -> str:
    """A Markdown table. Each cell is paper / **ours**, or only ours if the paper has no numbers.

    In a table of trials, only the chosen ones are bold.
    """
    study = table.study
    trials = any(entry.chosen for entry in table.entries)
    cell = _slashed if table.of_paper else _ours if bold and not trials else _text
    lines = [
        ["", *study.columns],
        ["---", *("---:" for _ in study.columns)],
        *([row, *(cell(table.at(row, column)) for column in study.columns)] for row in study.rows),
    ]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def csv_text(tables: Sequence[Table]) -> str:
    """One line per cell with unrounded numbers, the note of the cell and the caveat of the table."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = [
        "study",
        "row",
        "column",
        "paper",
        "ours",
        "spread",
        "seeds",
        "trials",
        "note",
        "state",
        "runs",
        "caveat",
    ]
    writer.writerow(head)
    for table in tables:
        for e in table.entries:
            state = "computed" if e.computed else "run" if e.value is not None else e.text
            writer.writerow(
                [
                    table.study.name,
                    e.row,
                    e.column,
                    _empty(e.paper),
                    _empty(e.value),
                    _empty(e.spread),
                    " and ".join(str(sample.seeds) for sample in e.samples),
                    e.trials or "",
                    e.note.strip(" ()"),
                    state,
                    " ".join(e.runs),
                    table.caveat,
                ]
            )
    return out.getvalue()


def latex(table: Table) -> str:
    study = table.study
    many = 2 if table.of_paper else 1
    spans = [rf"\multicolumn{{{many}}}{{c}}{{{_escaped(column)}}}" for column in study.columns]
    who = [["paper & ours"] * len(study.columns)] if table.of_paper else []
    _, rows = grid(table)
    body = [" & ".join(map(_escaped, row)) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{tabular}{l " + "r" * many * len(study.columns) + "}",
            r"\toprule",
            *(" & ".join(["", *head]) + r" \\" for head in [spans, *who]),
            r"\midrule",
            *body,
            *([r"\midrule", _across(table.caveat, 1 + many * len(study.columns))] if table.caveat else []),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _across(text: str, columns: int) -> str:
    return rf"\multicolumn{{{columns}}}{{l}}{{{_escaped(text)}}} \\"


def _pair(entry: Entry | None) -> tuple[str, str]:
    return ("", "") if entry is None else (entry.paper_text, entry.text)


def _joined(entry: Entry | None) -> str:
    return "" if entry is None else f"{entry.paper_text} | {entry.text}"


def _slashed(entry: Entry | None) -> str:
    return "" if entry is None else f"{entry.paper_text} / {_ours(entry)}"


def _ours(entry: Entry | None) -> str:
    """The number in bold, then its seeds and trials."""
    if entry is None:
        return ""
    origin = f" ({entry.origin})" if entry.origin else ""
    return entry.text if entry.value is None else f"**{entry.text}**{origin}"


def _text(entry: Entry | None) -> str:
    if entry is None:
        return ""
    return f"**{entry.text}**" if entry.chosen else entry.text


def _empty(value: object) -> object:
    return "" if value is None else value


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
