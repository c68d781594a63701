"""`fedpara sweep`: a grid of experiments, and a table with one row per setting."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import typer

from fedpara.apps.run import one_experiment, raise_failed, refuse_ranks, run_all
from fedpara.apps.studies.jobs import player
from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.engines.distributed.process_group import join
from fedpara.errors import ConfigError, FedParaError, UsageError
from fedpara.experiments import Experiment
from fedpara.experiments.storage.run_folder import refuse_another
from fedpara.experiments.storage.summary import Primary
from fedpara.experiments.studies.sweep import (
    Point,
    Row,
    points,
    read_grid,
    read_seeds,
    rows,
    take_up,
    text_of,
)
from fedpara.experiments.studies.tune import Play, Played
from fedpara.experiments.trackers import require


def sweep(
    preset: str | None,
    config: Path | None,
    set_: list[str],
    seeds: str | None,
    out: Path,
    data_dir: Path | None,
    track: str,
    jobs: int,
    minutes: float | None,
    as_json: bool,
) -> None:
    require(track)
    listed = _points(one_experiment(preset, config, {}), set_, seeds)
    engines = {point.experiment.engine for point in listed}
    refuse_ranks(*engines)
    with player(jobs, minutes, data_dir, track, engines=engines) as play:
        runs, failed = _carry_out(
            listed, out, data_dir, play or (lambda paths: run_all(paths, data_dir, track))
        )
    if join().rank == 0:
        table = rows(listed, runs)
        if as_json:
            typer.echo(json.dumps(_json(out, table, failed)))
        else:
            _print(table)
    raise_failed(failed, len(listed))


def _carry_out(listed: Sequence[Point], out: Path, data_dir: Path | None, play: Play) -> Played:
    """The finished runs of the points."""
    if (out / "config.toml").exists():
        raise ConfigError(f"{out} holds a run: choose another --out, or the folder of a sweep.")
    paths = {point.name: out / point.name for point in listed}
    for point in listed:
        if (paths[point.name] / "config.toml").exists():
            refuse_another(paths[point.name], point.experiment)
    finished = take_up({paths[point.name]: point.experiment for point in listed}, data_dir)
    runs = {name: finished[path] for name, path in paths.items() if path in finished}
    left = {name: path for name, path in paths.items() if name not in runs}
    fresh, failed = play(left) if left else ({}, {})
    return runs | fresh, failed


def _points(base: Experiment, given: Sequence[str], seeds: str | None) -> list[Point]:
    grid = read_grid(given)
    if "seed" in grid and seeds is not None:
        raise UsageError("the seeds are given twice, by --seeds and by --set seed: choose one.")
    if not grid and seeds is None:
        raise UsageError(
            "nothing to vary: give fields, such as --set lr=0.02,0.1, or seeds, such as --seeds 0-4."
        )
    wanted = grid.pop("seed", [base.seed]) if seeds is None else read_seeds(seeds)
    return points(base, grid, wanted)


def _print(table: Sequence[Row]) -> None:
    names = {row.group.metric.name for row in table if row.group.runs}
    heading = names.pop() if len(names) == 1 else "score"
    shown = empty_table([*table[0].values], [heading, "seeds", "sent [MB]", "rounds"])
    for row in table:
        runs = row.group.runs
        shown.add_row(
            *map(text_of, row.values.values()),
            _score(row),
            str(row.seeds) if len(runs) == row.seeds else f"{len(runs)} of {row.seeds}",
            f"{mean(run.bytes_up + run.bytes_down for run in runs) / 1e6:.2f}" if runs else "-",
            f"{mean(run.rounds for run in runs):g}" if runs else "-",
        )
    print_table(shown)
    if any(len(row.group.scores) > 1 for row in table):
        typer.echo("± is the 95% confidence interval of the mean over the seeds (Student's t).")


def _score(row: Row) -> str:
    metric, score = row.group.metric, row.group.score
    if score is None:
        return "-"
    interval = "" if score.half is None else f" ± {metric.text(score.half)}"
    return f"{metric.text(score.value)}{interval} ({row.scored})"


def _json(out: Path, table: Sequence[Row], failed: Mapping[str, FedParaError]) -> dict[str, Any]:
    return {
        "sweep": str(out),
        "settings": [_setting(row) for row in table],
        "failed": {name: str(error) for name, error in failed.items()},
    }


def _setting(row: Row) -> dict[str, Any]:
    runs, metric, score = row.group.runs, row.group.metric, row.group.score
    value = score.value if score else None
    own = {} if metric == Primary() else {"metric": asdict(metric), "score": value}
    return {
        "values": row.values,
        "accuracy": None if own else value,
        **own,
        "ci95": score.half if score else None,
        "scored": row.scored,
        "seeds": [run.experiment.seed for run in runs],
        "bytes_up": mean(run.bytes_up for run in runs) if runs else None,
        "bytes_down": mean(run.bytes_down for run in runs) if runs else None,
        "rounds": mean(run.rounds for run in runs) if runs else None,
        "runs": [str(run.path) for run in runs],
    }
