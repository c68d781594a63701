"""`fedpara tune`: choose settings by validation, then compare methods on the test set."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import typer

from fedpara.apps.run import experiments_of, one_experiment, refuse_ranks, run_all
from fedpara.apps.studies.jobs import player
from fedpara.apps.terminal.table import empty_table, print_table
from fedpara.engines.distributed.process_group import join
from fedpara.errors import UsageError, among
from fedpara.experiments import Experiment
from fedpara.experiments.config_file import read_value
from fedpara.experiments.seeds import Mean
from fedpara.experiments.studies.sweep import point_of, read_grid, read_seeds
from fedpara.experiments.studies.trials import PROTOCOL, Outcome
from fedpara.experiments.studies.tune import Tuned
from fedpara.experiments.studies.tune import tune as work
from fedpara.experiments.trackers import require
from fedpara.references import split

EXPECTED = "expected a name and its fields, such as fedpara:scheme=fedpara,gamma=0.1"


def tune(
    preset: str | None,
    config: Path | None,
    method: list[str],
    set_: list[str],
    one_at_a_time: bool,
    validation: float | None,
    rounds: int | None,
    seeds: str,
    final_seeds: str | None,
    final_rounds: int | None,
    out: Path,
    data_dir: Path | None,
    track: str,
    jobs: int,
    minutes: float | None,
    as_json: bool,
) -> None:
    require(track)
    methods = _methods(preset, config, method)
    engines = {experiment.engine for experiment in methods.values()}
    refuse_ranks(*engines)
    grid, own = read_grids(set_, methods)
    held_out = validation if validation is not None else next(iter(methods.values())).validation or 0.1
    with player(jobs, minutes, data_dir, track, engines=engines) as play:
        tuned = work(
            methods,
            out,
            grid,
            own=own,
            one_at_a_time=one_at_a_time,
            validation=held_out,
            rounds=rounds,
            seeds=list(dict.fromkeys(read_seeds(seeds))),
            final_seeds=list(dict.fromkeys(read_seeds(final_seeds, "--final-seeds"))) if final_seeds else [],
            final_rounds=final_rounds,
            data_dir=data_dir,
            play=play or (lambda paths: run_all(paths, data_dir, track)),
        )
    if join().rank:
        return
    if as_json:
        typer.echo(json.dumps({"tune": str(out), "methods": [json_of_tuned(one) for one in tuned]}))
    else:
        print_tuned(tuned)


def _methods(preset: str | None, config: Path | None, given: Sequence[str]) -> dict[str, Experiment]:
    """The methods by name: those given, the runs of the preset, or the experiment under the name of its scheme."""
    if not given:
        runs = experiments_of(preset, config, {})
        return runs if len(runs) > 1 else {one.scheme: one for one in runs.values()}
    base = one_experiment(preset, config, {})
    found: dict[str, Experiment] = {}
    for text in given:
        name, values = read_method(text)
        if name in found:
            raise UsageError(f"--method {name} is given twice: give each method its own name.")
        found[name] = point_of(base, values, base.seed).experiment
    return found


def read_method(text: str) -> tuple[str, dict[str, Any]]:
    """(name, fields) of a text such as fedpara:scheme=fedpara,gamma=0.1."""
    name, _, rest = text.partition(":")
    pairs = [part.partition("=") for part in split(rest)] if rest.strip() else []
    safe = name and all(letter.isalnum() or letter in "-_." for letter in name) and not name.startswith(".")
    if not safe or not all(field and value for field, _, value in pairs):
        raise UsageError(f"--method {text!r}: {EXPECTED}. The name is part of a folder's name.")
    values = {field.strip(): read_value(value.strip()) for field, _, value in pairs}
    for field in PROTOCOL:
        if field in values:
            raise UsageError(
                f"--method {text!r}: {field} is the same for every method. Give it as an option of the command."
            )
    return name, values


def read_grids(
    given: Sequence[str], methods: dict[str, Experiment]
) -> tuple[dict[str, list[Any]], dict[str, dict[str, list[Any]]]]:
    """(values for all methods, values for single methods), such as lr=0.02,0.1 and fedpara:init=he:1,he:2."""
    common: dict[str, list[Any]] = {}
    own: dict[str, dict[str, list[Any]]] = {}
    for field, values in read_grid(given).items():
        name, separator, of_method = field.rpartition(":")
        if separator and name not in methods:
            raise UsageError(f"--set {field}: unknown method {name!r}: {among(name, methods)}")
        (own.setdefault(name, {}) if separator else common)[of_method] = values
    return common, own


def print_tuned(tuned: Sequence[Tuned]) -> None:
    table = empty_table(["method", "trials", "chosen"], ["validation", "test", "sent [MB]"])
    for one in tuned:
        runs, chosen = one.final.runs, one.choice.chosen
        table.add_row(
            one.method,
            str(len(one.choice.outcomes)),
            chosen.trial.label,
            _validation(chosen),
            _with_half(one.final.score, one) if runs else "-",
            f"{mean(run.bytes_up + run.bytes_down for run in runs) / 1e6:.2f}" if runs else "-",
        )
    print_table(table)
    typer.echo(_legend(tuned))
    for one in tuned:
        for line in _remarks(one):
            typer.echo(f"{one.method}: {line}")


def _legend(tuned: Sequence[Tuned]) -> str:
    """What the columns mean, one line each."""
    chosen, final = tuned[0].choice.chosen, tuned[0].final
    known = any(one.choice.chosen.standard_error is not None for one in tuned)
    metric, error = chosen.group.metric.name, " ± its standard error" * known
    lines = [f"validation: {metric} of the chosen trial on held-out examples{error}."]
    if not final.runs:
        return f"{lines[0]} --final-seeds 1-3 scores the chosen settings on the test set."
    count = len(final.runs)
    interval = " ± its 95% confidence interval (Student's t)" * (count > 1)
    lines.append(f"test: mean over {count} other seed{'s' * (count != 1)}{interval}. sent: per final run.")
    return "\n".join(lines)


def _remarks(tuned: Tuned) -> list[str]:
    choice, metric = tuned.choice, tuned.choice.chosen.group.metric
    found = []
    if choice.ties:
        error = choice.chosen.standard_error
        near = f"within one standard error ({metric.text(error)}) of" if error else "equal to"
        labels = "; ".join(one.trial.label for one in choice.ties)
        count = len(choice.ties)
        is_near = f"{count} other trial{'s are' if count > 1 else ' is'} {near} the chosen one"
        found.append(f"{is_near}: {labels}.")
    if tuned.diverged:
        labels = "; ".join(one.trial.label for one in choice.outcomes if one.score is None)
        found.append(f"diverged, and counted as the worst: {labels}.")
    return found


def _validation(outcome: Outcome) -> str:
    assert outcome.score is not None
    text, error = outcome.group.metric.text, outcome.standard_error
    return text(outcome.score) + ("" if error is None else f" ± {text(error)}")


def _with_half(score: Mean | None, tuned: Tuned) -> str:
    if score is None:
        return "-"
    text = tuned.final.metric.text
    return text(score.value) + ("" if score.half is None else f" ± {text(score.half)}")


def json_of_tuned(tuned: Tuned) -> dict[str, Any]:
    choice, final, score = tuned.choice, tuned.final, tuned.final.score
    return {
        "method": tuned.method,
        "metric": asdict(choice.chosen.group.metric),
        "trials": [
            {
                "name": one.trial.name,
                "values": one.trial.values,
                "score": one.score,
                "standard_error": one.standard_error,
                "runs": [str(run.path) for run in one.group.runs],
            }
            for one in choice.outcomes
        ],
        "chosen": choice.chosen.trial.name,
        "ties": [one.trial.name for one in choice.ties],
        "diverged": tuned.diverged,
        "final": {
            "score": score.value if score else None,
            "ci95": score.half if score else None,
            "seeds": [run.experiment.seed for run in final.runs],
            "bytes_up": mean(run.bytes_up for run in final.runs) if final.runs else None,
            "bytes_down": mean(run.bytes_down for run in final.runs) if final.runs else None,
            "runs": [str(run.path) for run in final.runs],
        },
    }
