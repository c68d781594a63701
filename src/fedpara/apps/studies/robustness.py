"""`fedpara reproduce robustness`: the table of attacks and defences."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.experiments.studies.robustness import (
    FIRST_SEED,
    FIRST_VALIDATION_SEED,
    SEEDS,
    Outcome,
    rows,
    study,
)


def robustness(
    scale: str,
    seeds: int | None,
    first_seed: int | None,
    rounds: int | None,
    attacks: list[str],
    defences: list[str],
    validation: bool,
    part: str,
    device: str | None,
    out: Path,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Executes the runs that the files of `out` lack, and prints the table."""

    def show(made: Outcome) -> None:
        score = made.ended or f"accuracy {made.accuracy:.2%}"
        door = "" if made.backdoor is None else f", backdoor {made.backdoor:.1%}"
        typer.echo(f"{made.attack} | {made.defence} | seed {made.seed}: {score}{door}", err=True)

    first = (FIRST_VALIDATION_SEED if validation else FIRST_SEED) if first_seed is None else first_seed
    found = study(
        out,
        "digits" if scale == "paper" else scale,
        seeds=range(first, first + (seeds or SEEDS)),
        rounds=rounds,
        attacks=attacks,
        defences=defences,
        validation=validation,
        part=part,
        device=device,
        data_dir=data_dir,
        on_outcome=show,
    )
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
