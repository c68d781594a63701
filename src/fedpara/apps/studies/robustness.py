"""`fedpara reproduce robustness`: the table of attacks and defences."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.experiments.studies.robustness import SEEDS, Outcome, rows, study

RESULTS = "outcomes.jsonl"


def robustness(
    scale: str, seeds: int | None, rounds: int | None, device: str | None, out: Path, as_json: bool
) -> None:
    """Runs what is missing in `out`/outcomes.jsonl and prints the table."""

    def show(made: Outcome) -> None:
        score = made.ended or f"accuracy {made.accuracy:.2%}"
        typer.echo(f"{made.attack} | {made.defence} | seed {made.seed}: {score}", err=True)

    scale = "digits" if scale == "paper" else scale
    found = study(out / RESULTS, scale, seeds=seeds or SEEDS, rounds=rounds, device=device, on_outcome=show)
    if as_json:
        typer.echo(json.dumps([asdict(made) for made in found]))
        return
    heading, body = rows(found)
    table = empty_table(heading[:1], heading[1:])
    for row in body:
        table.add_row(*row)
    print_table(table)
    typer.echo(
        "Accuracy in %, and the share of triggered examples that reach the attacker's target in brackets."
    )
