"""A sweep: one run per point of a grid of settings and seeds, and one row per setting.

grid = {"lr": [0.02, 0.1], "scheme": ["fedpara", "lowrank"]}
points(Experiment(), grid, [0, 1])      eight points, such as lr=0.02,scheme=fedpara/seed=0
rows(points, runs)                      four rows, the best mean score first
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedpara.engines.distributed.process_group import Part, join
from fedpara.errors import UsageError
from fedpara.experiments.build import build
from fedpara.experiments.config import Experiment
from fedpara.experiments.config_file import read_value, with_values
from fedpara.experiments.run import lay_out_all, rounds_done
from fedpara.experiments.seeds import Group
from fedpara.experiments.storage.run_folder import open_run
from fedpara.experiments.storage.summary import Summary, read_config, read_run, stops_early
from fedpara.references import split

OPTION = "options."
"""Prefix of the algorithm's options in a grid, such as options.mu."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep. `values` are the fields of the grid, sorted by name, as the experiment holds them."""

    values: dict[str, Any]
    experiment: Experiment

    @property
    def setting(self) -> str:
        """The values in a form that is safe as a folder name; empty if only seeds vary."""
        return ",".join(f"{name}={quote(text_of(value), safe='+')}" for name, value in self.values.items())

    @property
    def name(self) -> str:
        """The run folder, relative to the folder of the sweep."""
        seed = f"seed={self.experiment.seed}"
        return f"{self.setting}/{seed}" if self.values else seed


@dataclass(frozen=True)
class Row:
    """A setting, the `group` of its finished runs, and the number of `seeds` that were asked for."""

    values: dict[str, Any]
    experiment: Experiment
    group: Group
    seeds: int

    @property
    def scored(self) -> str:
        """The examples that the scores are from."""
        return "validation" if self.experiment.validation else "test"


def read_grid(given: Iterable[str]) -> dict[str, list[Any]]:
    """Fields and their values from strings such as lr=0.02,0.1."""
    grid: dict[str, list[Any]] = {}
    for text in given:
        field, _, values = text.partition("=")
        name = field.strip()
        texts = split(values)
        if not name or not all(texts):
            raise UsageError(f"--set {text!r}: expected a field and its values, such as lr=0.02,0.1.")
        if name in grid:
            raise UsageError(f"--set {name} is given twice: give all values at once, such as lr=0.02,0.1.")
        grid[name] = [read_value(value) for value in texts]
    return grid


def read_seeds(text: str, option: str = "--seeds") -> list[int]:
    """The seeds of a list of numbers and ranges, such as 0,2,5 or 0-4."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        listed = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        if not listed:
            raise UsageError(
                f"{option} {text!r}: expected numbers or an ascending range, such as 0,2,5 or 0-4."
            )
        seeds += listed
    return seeds


def points(base: Experiment, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[Point]:
    """Every combination of the grid's values with every seed, each once.

    The first seed of all settings comes before the second of any, so that an interrupted sweep can be compared.
    """
    names = sorted(grid)
    found: dict[str, Point] = {}
    for seed in seeds:
        for values in product(*(grid[name] for name in names)):
            one = point_of(base, dict(zip(names, values, strict=True)), seed)
            found.setdefault(one.name, one)
    return list(found.values())


def point_of(base: Experiment, values: Mapping[str, Any], seed: int) -> Point:
    """The base with these fields and seed. options.mu is an option of the algorithm."""
    given = {name: value for name, value in values.items() if not name.startswith(OPTION)}
    options = {name.removeprefix(OPTION): values[name] for name in values.keys() - given.keys()}
    if options:
        given["options"] = {**base.options, **options}
    experiment = with_values(base, {**given, "seed": seed})
    kept = {
        name: getattr(experiment, name) if name in given else experiment.options[name.removeprefix(OPTION)]
        for name in values
    }
    return Point(kept, experiment)


def text_of(value: Any) -> str:
    """The shortest text of a value: 0.1, 1 (for 1.0), true, fedpara."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def take_up(runs: Mapping[Path, Experiment], data_dir: Path | None = None) -> dict[Path, Summary]:
    """The finished runs. Every other run gets a folder that `resume` continues.

    All runs are checked before the first folder is made. A folder that is already there takes over the experiment's
    rounds, engine, precision, device and target; its other fields must be the same.
    """
    there = [path for path in runs if (path / "config.toml").exists()]
    finished = {path: run for path in there if _is_finished(run := read_run(path), runs[path])}
    changed = [path for path in there if path not in finished and read_config(path) != runs[path]]
    group = join()
    # All ranks look before rank 0 makes a folder: another rank would take it for an interrupted run.
    group.gather("the list of runs")

    def look() -> Part:
        for path in changed if group.rank == 0 else ():
            new = runs[path]
            rounds_done(path, new.rounds, new.engine, new.precision, data_dir, new.device)
        return Part()

    def change() -> Part:
        for path in changed if group.rank == 0 else ():
            with closing(open_run(path, runs[path], build(runs[path], data_dir).digest)):
                pass
        return Part()

    group.gather("looking at the runs that are there", look)
    lay_out_all({path: runs[path] for path in runs if path not in there}, data_dir=data_dir)
    group.gather("changing the runs that are there", change)
    return finished


def _is_finished(run: Summary, experiment: Experiment) -> bool:
    return run.rounds == experiment.rounds or stops_early(experiment, run.metrics, run.metric)


def rows(points: Iterable[Point], runs: Mapping[str, Summary]) -> list[Row]:
    """One row per setting, the best mean score first. `runs` are the finished ones by their point's name."""
    settings: dict[str, list[Point]] = {}
    for point in points:
        settings.setdefault(point.setting, []).append(point)
    found = [
        Row(
            same[0].values,
            same[0].experiment,
            Group(tuple(runs[point.name] for point in same if point.name in runs)),
            len(same),
        )
        for same in settings.values()
    ]
    return sorted(found, key=lambda row: row.group.rank, reverse=True)
