"""Results of finished runs: a table for people, JSON for programs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.experiments import Summary
from fedpara.privacy.spending import in_words
from fedpara.tasks.metrics import FRACTIONS


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
        metrics = {name: asdict(one) for name, one in summary.distributions.items()}
        row["everyone"] = {**summary.everyone, "metrics": metrics}
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
        score = "-" if s.final is None else f"{_short(s.metric.name, s.final)}{held_out}{_averaged_over(s)}"
        table.add_row(
            name,
            str(s.rounds),
            score,
            f"{sent / 1e6:.2f}",
            *[f"{most / max(1, sent):.1f}"] * several,
            f"{s.seconds:.1f}",
        )
    print_table(table)
    if any(s.distributions for s in runs.values()):
        _print_clients(runs)
    for name, s in runs.items():
        if s.privacy:
            typer.echo(f"{name}: {in_words(s.privacy)}")


def _print_clients(runs: dict[str, Summary]) -> None:
    """Each metric over the clients: the worst client, three quantiles and the mean."""
    table = empty_table(["run", "metric"], ["worst client", "10%", "50%", "90%", "mean", "clients"])
    for name, s in runs.items():
        for metric, one in s.distributions.items():
            worst = "-" if one.worst is None else f"{_short(metric, one.worst)} (client {one.worst_client})"
            others = (_short(metric, value) for value in (one.q10, one.q50, one.q90, one.mean))
            table.add_row(name, metric, worst, *others, str(one.clients))
    print_table(table)


def _short(metric: str, value: float) -> str:
    return f"{value:.1%}" if metric in FRACTIONS else f"{value:.4g}"


def _averaged_over(run: Summary) -> str:
    """The number of clients over which a personal accuracy is averaged, such as ` (all 5 clients)`."""
    if run.everyone is None:
        return f" ({run.metrics[-1]['clients']} of {run.clients} clients)" if run.of_cohort else ""
    clients, of = run.everyone["clients"], run.everyone["of"]
    return f" (all {of} clients)" if clients == of else f" ({clients} of {of} clients)"
