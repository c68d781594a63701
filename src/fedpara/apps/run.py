"""`fedpara run` and `fedpara resume`; `commands.py` declares their options."""

import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import typer

from fedpara.apps.studies.folders import runs_in, study_command, why_none
from fedpara.apps.terminal.progress import Show, say
from fedpara.apps.terminal.results import json_of, print_runs
from fedpara.engines.distributed.process_group import Part, join
from fedpara.errors import ConfigError, FedParaError, UsageError, of_several
from fedpara.experiments import Experiment, Summary, read_run
from fedpara.experiments import resume as resume_run
from fedpara.experiments.config_file import read_options, read_toml, read_value, with_values
from fedpara.experiments.presets import preset as find_preset
from fedpara.experiments.run import lay_out_all, rounds_done
from fedpara.experiments.storage.run_folder import refuse_used
from fedpara.experiments.storage.summary import budget_spent, stops_early
from fedpara.experiments.trackers import require, tracker
from fedpara.files import make_folder


def run(
    preset: str | None,
    config: Path | None,
    given: dict[str, Any],
    option: list[str] | None,
    out: Path | None,
    data_dir: Path | None,
    track: str,
    as_json: bool,
) -> None:
    """`given` holds the experiment's fields that were given as options."""
    if option:
        given = {**given, "options": read_options(option)}
    given |= {name: read_value(given[name]) for name in ("bandwidth", "speed") if name in given}
    require(track)
    experiments = experiments_of(preset, config, given)
    refuse_ranks(*(experiment.engine for experiment in experiments.values()))
    folder = _folder(out, preset or "run", list(experiments))
    alone = len(experiments) == 1
    paths = {name: folder if alone else folder / name for name in experiments}
    try:
        lay_out_all({paths[name]: experiment for name, experiment in experiments.items()}, data_dir=data_dir)
    except BaseException:
        if out is None:
            _remove_empty(folder, folder.parent)
        raise
    finish(folder, _run_all_or_raise(paths, data_dir, track), as_json)


def resume(
    folder: Path,
    rounds: int | None,
    engine: str | None,
    precision: str | None,
    device: str | None,
    data_dir: Path | None,
    track: str,
    as_json: bool,
) -> None:
    paths = runs_in(folder)
    if not paths:
        raise ConfigError(f"{folder} holds no run to resume: {why_none(folder)}")
    command = study_command(paths) if folder not in paths.values() else ""
    if command and not join().rank:
        say(
            f"resuming the runs of a study; its command then starts missing runs and compares them: {command}"
        )
    runs = _run_all_or_raise(paths, data_dir, track, rounds, engine, precision, device)
    finish(folder, runs, as_json, figure=not command)


def _folder(out: Path | None, name: str, runs: list[str]) -> Path:
    """The folder that rank 0 chooses. ConfigError if several runs would be mixed with other files."""
    group = join()

    def work() -> Part:
        if group.rank:
            return Part()
        if out is not None and len(runs) > 1:
            for path in (*(out / run for run in runs), out):
                refuse_used(path)
        return Part({"text": str(out or _new_folder(name))})

    return Path(group.gather("the choice of a folder", work)[0].header["text"])


def _new_folder(name: str) -> Path:
    """A new folder, created immediately because another run may start in the same second."""
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    make_folder(first.parent, "folder of runs")
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def experiments_of(preset: str | None, config: Path | None, given: dict[str, Any]) -> dict[str, Experiment]:
    if preset is None:
        base = read_toml(config) if config else Experiment()
        return {"run": with_values(base, given)}
    if config is not None:
        raise UsageError("a preset and --config are both given: choose one.")
    runs = find_preset(preset).runs
    if len(runs) > 1 and {"scheme", "gamma", "rank"} & given.keys():
        raise UsageError(
            f"{preset} compares schemes itself: leave out --scheme, --gamma and --rank, or leave out the preset."
        )
    return {name: with_values(experiment, given) for name, experiment in runs.items()}


def one_experiment(preset: str | None, config: Path | None, given: dict[str, Any]) -> Experiment:
    """The experiment of a command that takes a single one. UsageError for a preset of several runs."""
    runs = experiments_of(preset, config, given)
    if len(runs) > 1:
        raise UsageError(
            f"{preset} has {len(runs)} runs ({', '.join(runs)}): write one of them as a --config."
        )
    return next(iter(runs.values()))


def _run_all_or_raise(paths: dict[str, Path], *how: Any) -> dict[str, Summary]:
    """`run_all` for runs that belong together: RunError at the end names those that failed."""
    summaries, failed = run_all(paths, *how)
    raise_failed(failed, len(paths))
    return summaries


def run_all(
    paths: dict[str, Path],
    data_dir: Path | None,
    track: str,
    rounds: int | None = None,
    engine: str | None = None,
    precision: str | None = None,
    device: str | None = None,
) -> tuple[dict[str, Summary], dict[str, FedParaError]]:
    """The finished runs and the errors of the failed ones. If a run fails, the others still run."""
    summaries: dict[str, Summary] = {}
    failed: dict[str, FedParaError] = {}

    @contextmanager
    def trying(name: str) -> Iterator[None]:
        try:
            yield
        except FedParaError as error:
            if join().over:
                raise
            failed[name] = error

    before: dict[str, Summary] = {}
    for name, path in paths.items():
        with trying(name):
            before[name] = read_run(path)
    engines = {name: engine or summary.experiment.engine for name, summary in before.items()}
    refuse_ranks(*engines.values())
    for name in [name for name in before if engines[name] == "flower"]:
        with trying(name):
            # Flower would only log the error.
            rounds_done(paths[name], rounds, engine, precision, data_dir, device)
    left = [name for name in before if name not in failed]
    by_flower = [paths[name] for name in left if engines[name] == "flower"]
    with _simulation(by_flower, rounds, data_dir) as simulated:
        for name in left:
            path, experiment = paths[name], before[name].experiment
            _report_reached_target(name, before[name], rounds or experiment.rounds)
            with (
                trying(name),
                tracker(track if join().rank == 0 else "none", path, asdict(experiment)) as log,
                Show(name, rounds or experiment.rounds) as show,
            ):

                def on_round(result: Any, timing: dict[str, float], show: Any = show, log: Any = log) -> None:
                    show(result, timing)
                    log(result, timing)

                play = (
                    simulated
                    if path in by_flower
                    else partial(resume_run, precision=precision, device=device)
                )
                summaries[name] = play(
                    path, rounds=rounds, engine=engine, data_dir=data_dir, on_round=on_round
                )
    return summaries, failed


def raise_failed(failed: dict[str, FedParaError], of: int) -> None:
    """RunError that names the failed runs. If all `of` runs failed with the same error, raises that error."""
    if len(failed) == of and len({str(error) for error in failed.values()}) == 1:
        raise next(iter(failed.values()))  # the same mistake in every run
    if failed:
        raise of_several(failed, of)


def _report_reached_target(name: str, run: Summary, rounds: int) -> None:
    target = run.experiment.target
    reached = run.reached(target) if target is not None else None
    if run.rounds >= rounds or join().rank:
        return
    if reached:
        say(
            f"{name}: the target {run.metric.name} of {target:g} was reached in round {reached['round']}: nothing "
            "to run."
        )
    elif budget_spent(run.experiment, run.metrics):
        say(f"{name}: the privacy budget of epsilon {run.experiment.epsilon:g} is spent: nothing to run.")
    elif stops_early(run.experiment, run.metrics, run.metric):
        say(f"{name}: no better score in {run.experiment.patience} evaluations: nothing to run.")


def refuse_ranks(*engines: str) -> None:
    if "flower" in engines and join().size > 1:
        raise UsageError("--engine flower starts its own processes: use it without torchrun.")


@contextmanager
def _simulation(
    paths: list[Path], rounds: int | None, data_dir: Path | None
) -> Iterator[Callable[..., Summary]]:
    if not paths:
        yield resume_run
        return
    from fedpara.apps.flower.simulation import Simulation

    with Simulation(paths, rounds, data_dir) as simulation:
        yield simulation.resume


def finish(folder: Path, runs: dict[str, Summary], as_json: bool, figure: bool = True) -> None:
    if join().rank:
        return
    if len(runs) > 1 and figure:
        from fedpara.report.figures import accuracy_against_bytes

        drawn = accuracy_against_bytes(runs, folder / "accuracy-against-bytes.png")
        if not as_json:
            print_runs(runs)
            typer.echo(f"figure: {drawn}")
    elif not as_json:
        print_runs(runs)
    if as_json:
        typer.echo(json.dumps(json_of(folder, runs)))
    else:
        first = next(iter(runs.values()))
        private = first.experiment.scheme == "pfedpara" or first.experiment.share != "all"
        words = f"fedpara export {shlex.quote(str(first.path))} --format safetensors{' --client N' * private}"
        typer.echo(f"look deeper: {words}, or read {shlex.quote(str(first.path / 'metrics.jsonl'))}")
