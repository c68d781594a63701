"""`fedpara reproduce`: a table or figure of the paper by name."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer

from fedpara.apps.studies.jobs import player
from fedpara.apps.terminal.progress import Show
from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.engines.distributed.process_group import join
from fedpara.errors import UsageError
from fedpara.experiments import Experiment
from fedpara.experiments.paper import STUDIES, Study, merged, study
from fedpara.experiments.paper.sizes import gpu_minutes, total_bytes
from fedpara.experiments.run import OnRound
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.reproduce import archive_finished, carry_out
from fedpara.experiments.studies.reproduce import jobs as jobs_of
from fedpara.experiments.studies.tuned.cost import cost
from fedpara.experiments.studies.tuned.plans import PLANS
from fedpara.report.figures import study_figure
from fedpara.report.formats import plain
from fedpara.report.tables import Table, table_of


def reproduce(
    names: list[str] | None,
    list_: bool,
    seeds: int | None,
    rounds: int | None,
    only: str | None,
    scale: str,
    out: Path,
    results: Path,
    data_dir: Path | None,
    given: dict[str, str | None],
    keep: Path | None,
    jobs: int,
    minutes: float | None,
    as_json: bool,
) -> None:
    """`given` are the engine, precision and device."""
    if list_:
        _list(as_json)
        return
    if not names:
        raise UsageError(f"name a table or figure; `--list` shows what each costs: {', '.join(STUDIES)}.")
    studies = [study(name) for name in names]
    engines = {given["engine"] or "auto"}
    with (
        player(jobs, minutes, data_dir, engines=engines) as play,
        ExitStack() as stack,
        kept(out, keep),
    ):

        def begin(name: str, experiment: Experiment) -> OnRound:
            stack.close()
            return stack.enter_context(Show(name, experiment.rounds))

        carry_out(
            names,
            seeds=seeds,
            rounds=rounds,
            only=only,
            scale=scale,
            out=out,
            finished_in=(results,),
            data_dir=data_dir,
            begin=begin,
            play=play,
            **given,
        )
    if join().rank:
        return
    library = Library.of(out, results)
    shown: list[tuple[Table, Path | None]] = []
    for one in studies:
        table = table_of(one, library, range(seeds or one.seeds), rounds, scale)
        runs = [
            job.found
            for job in jobs_of([one.name], library, seeds=seeds, rounds=rounds, scale=scale)
            if job.found
        ]
        shown.append((table, study_figure(table, runs, out / "figures" / f"{one.name}.png")))
    if as_json:
        typer.echo(json.dumps({table.study.name: _json(table, figure) for table, figure in shown}))
        return
    for table, figure in shown:
        typer.echo(plain(table))
        for note in table.study.notes:
            typer.echo(f"  {note}")
        if figure is not None:
            typer.echo(f"figure: {figure}")
        typer.echo("")


@contextmanager
def kept(out: Path, keep: Path | None) -> Iterator[None]:
    """Copies the finished runs of `out` to `keep` when the block ends, even if a run failed or was interrupted."""
    try:
        yield
    finally:
        if keep is not None and join().rank == 0:
            archive_finished(out, keep)


def _json(table: Table, figure: Path | None) -> dict[str, Any]:
    cells = [
        {
            "row": e.row,
            "column": e.column,
            "paper": e.paper,
            "ours": e.value,
            "spread": e.spread,
            "seeds": e.seeds,
            "seeds_of_each": [sample.seeds for sample in e.samples],
            "text": e.text,
            "runs": list(e.runs),
        }
        for e in table.entries
    ]
    return {
        "title": table.study.title,
        "source": table.study.source,
        "caveat": table.caveat,
        "cells": cells,
        "figure": str(figure or ""),
    }


def _list(as_json: bool) -> None:
    rows = {one.name: _cost(one) for one in STUDIES.values()}
    prepared = {name: cost(plan) for name, plan in PLANS.items()}
    whole = merged([e for one in STUDIES.values() for e in one.experiments])
    if as_json:
        typer.echo(json.dumps({"studies": rows, "all": _sum(whole), "prepared": prepared}))
        return
    table = empty_table(["name", "in the paper", "what"], ["runs", "seeds", "GPU minutes", "GB sent"])
    for name, row in rows.items():
        numbers = (
            str(row["runs"]),
            str(row["seeds"]),
            _whole(row["gpu_minutes"]),
            _whole(row["gigabytes"]),
        )
        table.add_row(name, row["source"], row["title"], *(numbers if row["runs"] else ("", "", "", "")))
    total = _sum(whole)
    table.add_section()
    table.add_row(
        "all",
        "",
        "shared runs counted once",
        str(total["runs"]),
        "",
        _whole(total["gpu_minutes"]),
        _whole(total["gigabytes"]),
    )
    print_table(table)
    typer.echo(
        "GPU minutes (an estimate for one H200) and GB (message length times messages) are for one seed."
    )
    table = empty_table(["prepared study", "what"], ["trials", "final runs", "GPU minutes"])
    for name, row in prepared.items():
        table.add_row(
            name, row["title"], str(row["trials"]), str(row["final_runs"]), _whole(row["gpu_minutes"])
        )
    print_table(table)
    typer.echo("GPU minutes of prepared studies are for all their seeds, if every run is alone on the GPU.")


def _cost(one: Study) -> dict[str, Any]:
    return {"title": one.title, "source": one.source, "seeds": one.seeds, **_sum(one.experiments)}


def _sum(experiments: Sequence[Experiment]) -> dict[str, Any]:
    return {
        "runs": len(experiments),
        "gpu_minutes": round(sum(map(gpu_minutes, experiments)), 1),
        "gigabytes": round(sum(map(total_bytes, experiments)) / 1e9, 1),
    }


def _whole(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"
