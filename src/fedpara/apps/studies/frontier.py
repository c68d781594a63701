"""`fedpara reproduce frontier` and `fedmud`: run the combinations of a scale, print the table and draw the figure."""

import json
import shlex
from contextlib import ExitStack
from pathlib import Path

import typer

from fedpara.apps.studies.jobs import player
from fedpara.apps.studies.reproduce import kept
from fedpara.apps.terminal.progress import Show
from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.engines.distributed.process_group import join
from fedpara.experiments import Experiment
from fedpara.experiments.config_file import to_toml
from fedpara.experiments.run import OnRound
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.frontier.cost import costs
from fedpara.experiments.studies.frontier.study import FOLDER, SEEDS, Stage, frontier_jobs, points, scale_of
from fedpara.experiments.studies.reproduce import Job, run_jobs
from fedpara.files import make_folder, write_bytes
from fedpara.report.frontier import Section, draw, rows, unit_of


def frontier(
    study: str,
    scale_name: str,
    stage: Stage,
    list_: bool,
    seeds: int | None,
    rounds: int | None,
    only: str | None,
    out: Path,
    results: Path,
    data_dir: Path | None,
    given: dict[str, str | None],
    keep: Path | None,
    configs: Path | None,
    jobs: int,
    minutes: float | None,
    as_json: bool,
) -> None:
    """Executes the runs that `out` and `results` lack. With `configs`, only writes their configs."""
    scale = scale_of(scale_name, study)
    scale_name = scale_name if study == FOLDER else f"{study}-{scale_name}"
    if list_:
        _list(scale_name, rounds, as_json)
        return
    folder = out / scale_name / stage
    library = Library.of(out, results)
    chosen = [one.strip() for one in only.split(",")] if only else []
    listed = frontier_jobs(scale, stage, library, seeds=seeds, rounds=rounds, only=chosen)
    if configs is not None:
        _write_configs([job for job in listed if job.found is None], configs, folder)
        return
    engines = {given["engine"] or "auto"}
    with (
        player(jobs, minutes, data_dir, engines=engines) as play,
        ExitStack() as stack,
        kept(folder, keep and keep / scale_name / stage),
    ):

        def begin(name: str, experiment: Experiment) -> OnRound:
            stack.close()
            return stack.enter_context(Show(name, experiment.rounds))

        run_jobs(listed, library, folder, data_dir=data_dir, given=given, begin=begin, play=play)
    if join().rank:
        return
    found = points(scale, stage, Library.of(out, results), seeds or SEEDS, rounds)
    _show(Section(scale_name, stage, found), out, as_json)


def _write_configs(missing: list[Job], into: Path, folder: Path) -> None:
    """One TOML file per run, and its command on stdout."""
    make_folder(into)
    for job in missing:
        path = into / f"{job.name}.toml"
        write_bytes(path, to_toml(job.experiment).encode())
        words = ["fedpara", "run", "--config", str(path), "--out", str(folder / job.name)]
        typer.echo(shlex.join(words))


def _show(section: Section, out: Path, as_json: bool) -> None:
    figure = draw(section, out / f"{section.name}.svg")
    headings, body = rows(section)
    if as_json:
        listed = [dict(zip(headings, row, strict=True)) for row in body]
        runs = {one.combination: [str(run.path) for run in one.runs] for one in section.points}
        typer.echo(json.dumps({"title": section.title, "figure": str(figure), "rows": listed, "runs": runs}))
        return
    table = empty_table(headings[:1], headings[1:], section.title)
    for row in body:
        table.add_row(*row)
    print_table(table)
    typer.echo("± is the standard deviation over the seeds.")
    typer.echo(f"figure: {figure}")


def _list(scale_name: str, rounds: int | None, as_json: bool) -> None:
    """Prints the cost of each combination, without training."""
    found = costs(scale_of(scale_name), rounds)
    if as_json:
        typer.echo(json.dumps(found))
        return
    unit = unit_of(max(row["bytes"] or 0.0 for row in found.values()))

    def cell(number: float | None, per: float, digits: str) -> str:
        return "–" if number is None else f"{number / per:{digits}}"

    shown = empty_table(["combination"], ["parameters", "up [MB]", "down [MB]", f"all rounds [{unit.name}]"])
    for name, row in found.items():
        mega = (cell(row[way], 1e6, ".3f") for way in ("up", "down"))
        total = cell(row["bytes"], unit.bytes, ".3g")
        shown.add_row(name, cell(row["parameters"], 1, ",.0f"), *mega, total)
    print_table(shown)
    typer.echo(
        "up, down: the mean per client and round, from the length of encoded messages and the drawn cohorts. "
        "–: the length depends on the training."
    )
