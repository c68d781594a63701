"""Results of finished runs: a table for people, JSON for programs."""

from pathlib import Path
from typing import Any

import typer

from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.experiments import Summary
from fedpara.privacy.spending import in_words


def json_of(folder: Path, runs: dict[str, Summary]) -> dict[str, Any]:
    """A single run's results; several runs' results by name."""
    rows = {name: _row(summary) for name, summary in runs.items()}
    if len(rows) == 1:
        return next(iter(rows.values()))
    return {"run": str(folder), "runs": rows}


def _row(summary: Summary) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": str(summary.path),
        "rounds": summary.rounds,
        "accuracy": summary.accuracy,
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
        "seconds": round(summary.seconds, 3),
        "engine": summary.engine,
    }
    if summary.everyone:
        row["everyone"] = summary.everyone
    if summary.privacy:
        row["privacy"] = summary.privacy
    if summary.experiment.validation:
        row["scored"] = "validation"
    target = summary.experiment.target
    if target is not None:
        reached = summary.reached(target)
        sent = reached["total_up"] + reached["total_down"] if reached else None
        row["target"] = {"accuracy": target, "rounds": reached["round"] if reached else None, "bytes": sent}
    return row


def print_runs(runs: dict[str, Summary]) -> None:
    most = max(summary.bytes_up + summary.bytes_down for summary in runs.values())
    several = len(runs) > 1
    fewer = ["times fewer bytes"] * several
    names = {summary.metric.name for summary in runs.values()}
    table = empty_table(
        ["run"], ["rounds", names.pop() if len(names) == 1 else "score", "sent [MB]", *fewer, "seconds"]
    )
    for name, s in runs.items():
        sent = s.bytes_up + s.bytes_down
        held_out = " (validation)" * (s.experiment.validation > 0)
        score = "-" if s.final is None else f"{_short(s)}{held_out}{_averaged_over(s)}"
        table.add_row(
            name,
            str(s.rounds),
            score,
            f"{sent / 1e6:.2f}",
            *[f"{most / max(1, sent):.1f}"] * several,
            f"{s.seconds:.1f}",
        )
    print_table(table)
    for name, s in runs.items():
        if s.privacy:
            typer.echo(f"{name}: {in_words(s.privacy)}")


def _short(run: Summary) -> str:
    return f"{run.final:.1%}" if run.metric.unit else f"{run.final:.4g}"


def _averaged_over(run: Summary) -> str:
    """The number of clients over which a personal accuracy is averaged, such as ` (all 5 clients)`."""
    if run.everyone is None:
        return f" ({run.metrics[-1]['clients']} of {run.clients} clients)" if run.of_cohort else ""
    clients, of = run.everyone["clients"], run.everyone["of"]
    return f" (all {of} clients)" if clients == of else f" ({clients} of {of} clients)"
