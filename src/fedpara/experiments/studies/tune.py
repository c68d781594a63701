"""Tune methods by validation, then compare them on the test set.

grid.json            the trials of each method
trials/NAME-K-seedS  trial K of a method, scored on examples held out from every client's training data
chosen.json          the best trial of each method, and the errors of diverged trials
final/NAME-seedS     the chosen setting on the test set, with a seed that chose nothing
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from fedpara.engines.distributed.process_group import Part, join
from fedpara.errors import ConfigError, FedParaError, RunError, of_several
from fedpara.experiments.config import Experiment
from fedpara.experiments.federation import load_federation
from fedpara.experiments.node_data import is_own
from fedpara.experiments.run import resume
from fedpara.experiments.seeds import Group
from fedpara.experiments.storage.run_folder import refuse_another
from fedpara.experiments.storage.summary import Summary, read_run
from fedpara.experiments.studies.sweep import take_up
from fedpara.experiments.studies.trials import Choice, Grid, Outcome, Trial, all_trials
from fedpara.files import write_bytes

GRID, CHOSEN = "grid.json", "chosen.json"
DIVERGED = ("diverged", "NaN or infinity")
"""Texts in the error of a run that diverged. Divergence is a trial's result: repeating the trial gives the same."""

Played = tuple[dict[str, Summary], dict[str, FedParaError]]
Play = Callable[[dict[str, Path]], Played]
"""Resumes run folders by name. Returns the finished runs and the errors of the failed ones."""


@dataclass(frozen=True)
class Tuned:
    """The result for one method.

    `diverged` are the errors of its diverged trials by run. `final` are the runs of the chosen setting on the test set.
    """

    method: str
    choice: Choice
    diverged: dict[str, str]
    final: Group


def tune(
    methods: Mapping[str, Experiment],
    out: str | PathLike[str],
    grid: Grid,
    *,
    own: Mapping[str, Grid] | None = None,
    one_at_a_time: bool = False,
    validation: float = 0.1,
    rounds: int | None = None,
    seeds: Sequence[int] = (100,),
    final_seeds: Sequence[int] = (),
    final_rounds: int | None = None,
    data_dir: Path | None = None,
    play: Play | None = None,
) -> list[Tuned]:
    """For each method, choose the best of its trials by validation and run it with `final_seeds` on the test set.

    `grid` holds the values to try for every method, and `own` those of single methods; the numbers of trials must be
    equal. The trials are all combinations or, `one_at_a_time`, the method's experiment and each value alone. Trials run
    for `rounds` with `seeds`, final runs for `final_rounds` (default: the method's own rounds).

    The same call resumes interrupted runs and skips finished ones. A trial that diverges counts as the worst. RunError
    if a run fails for another reason, or if all trials of a method diverge.
    """
    path, play = Path(out), play or (lambda paths: _resume_all(paths, data_dir))
    _check_seeds(validation, seeds, final_seeds)
    protocol = {"validation": validation, "seed": seeds[0]} | ({"rounds": rounds} if rounds else {})
    trials = all_trials(methods, grid, own or {}, one_at_a_time, protocol)
    _refuse_mixed_scores([trial for same in trials.values() for trial in same])
    _refuse_another_grid(path, described := _described(trials, seeds))
    if final_seeds and not (path / CHOSEN).exists():
        _check_final_scores([same[0].experiment for same in trials.values()], final_seeds[0], data_dir)
    runs = trial_runs(trials, seeds)
    choices, failed = _choose(path, trials, runs, seeds, described, data_dir, play)
    lengths = {name: final_rounds or experiment.rounds for name, experiment in methods.items()}
    finals = final_runs(choices, lengths, final_seeds)
    done, broken = _carry_out(path / "final", finals, data_dir, play)
    if broken:
        raise of_several(broken, len(finals))
    return [
        Tuned(
            name,
            choice,
            {run: text for run, text in failed.items() if run in _run_names(choice, seeds)},
            Group(tuple(done[f"{name}-seed{seed}"] for seed in final_seeds)),
        )
        for name, choice in choices.items()
    ]


def trial_runs(trials: Mapping[str, Sequence[Trial]], seeds: Sequence[int]) -> dict[str, Experiment]:
    """The experiments of the trials by the name of their folder, the first seed of all before the second of any."""
    return {
        _run_name(trial, seed): replace(trial.experiment, seed=seed)
        for seed in seeds
        for trial in _flat(trials)
    }


def final_runs(
    choices: Mapping[str, Choice], rounds: Mapping[str, int], seeds: Sequence[int]
) -> dict[str, Experiment]:
    """The chosen settings on the test set by the name of their folder, in the order of `trial_runs`."""
    return {
        f"{name}-seed{seed}": replace(
            choice.chosen.trial.experiment, validation=0.0, seed=seed, rounds=rounds[name]
        )
        for seed in seeds
        for name, choice in choices.items()
    }


def _check_seeds(validation: float, seeds: Sequence[int], final_seeds: Sequence[int]) -> None:
    if not validation:
        raise ConfigError("validation is 0: tuning needs held-out examples. Give a fraction, such as 0.1.")
    both = sorted({*seeds} & {*final_seeds})
    if both:
        raise ConfigError(
            f"seed {both[0]} is a seed of the trials and of the final runs: final runs need seeds that chose nothing. "
            "Choose other final seeds."
        )


def _refuse_mixed_scores(trials: Sequence[Trial]) -> None:
    """The test set scores one model, and `personal` many: the best of both means nothing."""
    of = {trial.experiment.personal: trial.method for trial in trials}
    if len(of) > 1:
        raise ConfigError(
            f"{of[True]} scores each client's own model (personal), and {of[False]} one model on the test set: set "
            "personal for all methods, as in --config or a preset."
        )


def _check_final_scores(methods: Sequence[Experiment], seed: int, data_dir: Path | None) -> None:
    """ConfigError if the data has nothing that final runs can score: better now than after all trials."""
    for experiment in {(e.dataset, e.personal): e for e in methods if not is_own(e.dataset)}.values():
        federation, test = load_federation(replace(experiment, validation=0.0, seed=seed), data_dir)
        if experiment.personal and not federation.has_personal:
            raise ConfigError(
                "the final runs score each client's own model on its own test data (personal), and no client has any: "
                "give the clients test data, or leave out the final seeds to choose by validation only."
            )
        if not experiment.personal and test is None:
            raise ConfigError(
                f"the final runs score the test set, and {experiment.dataset} has none: return one, or leave out the "
                "final seeds to choose by validation only."
            )


def _flat(trials: Mapping[str, Sequence[Trial]]) -> Iterator[Trial]:
    """Trial 0 of every method, then trial 1 of every method: an interrupted grid can be compared."""
    return (trial for same in zip(*trials.values(), strict=True) for trial in same)


def _run_name(trial: Trial, seed: int) -> str:
    return f"{trial.name}-seed{seed}"


def _run_names(choice: Choice, seeds: Sequence[int]) -> set[str]:
    return {_run_name(outcome.trial, seed) for outcome in choice.outcomes for seed in seeds}


def _described(trials: Mapping[str, Sequence[Trial]], seeds: Sequence[int]) -> dict[str, Any]:
    """What grid.json holds. Another grid has another description."""
    first = next(_flat(trials)).experiment
    return {
        "validation": first.validation,
        "rounds": {name: same[0].experiment.rounds for name, same in trials.items()},
        "seeds": list(seeds),
        "methods": {
            name: {trial.name: [trial.label, trial.experiment.identity] for trial in same}
            for name, same in trials.items()
        },
    }


def _refuse_another_grid(path: Path, described: Mapping[str, Any]) -> None:
    if (path / "config.toml").exists():
        raise ConfigError(f"{path} holds a run: choose another folder.")
    if not (path / GRID).exists():
        return
    there = _read(path / GRID)
    different = [name for name, value in described.items() if there.get(name) != value]
    if different:
        raise ConfigError(
            f"{path} holds another grid (its {' and '.join(different)} differ): choose another folder, or give the "
            f"values in {path / GRID}."
        )


def held_out_examples(path: Path) -> int | None:
    """The number of held-out examples of a folder of `tune`, if its choice is made and the number is known."""
    count = _read(path / CHOSEN).get("examples") if (path / CHOSEN).exists() else None
    return count if isinstance(count, int) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: expected a JSON object. Delete it to choose again.")
    return found


def _choose(
    path: Path,
    trials: Mapping[str, Sequence[Trial]],
    runs: Mapping[str, Experiment],
    seeds: Sequence[int],
    described: dict[str, Any],
    data_dir: Path | None,
    play: Play,
) -> tuple[dict[str, Choice], dict[str, str]]:
    """(the choice of each method, the errors of diverged runs by name). Once made, a choice is final."""
    folder, group = path / "trials", join()
    known = group.gather("the choice", lambda: Part(_read(path / CHOSEN) if (path / CHOSEN).exists() else {}))
    before = known[0].header if "chosen" in known[0].header else None
    if before is not None:
        failed = dict(before["diverged"])
        done = {name: read_run(folder / name) for name in runs if name not in failed}
        examples = before["examples"]
    else:
        done, errors = _carry_out(folder, runs, data_dir, play, lambda: _save(path / GRID, described))
        broken = {name: e for name, e in errors.items() if not any(text in str(e) for text in DIVERGED)}
        if broken:
            raise of_several(broken, len(runs))
        failed = {name: str(error) for name, error in errors.items()}
        examples = _examples(next(iter(runs.values())), data_dir)
    choices = {}
    for name, same in trials.items():
        outcomes = [
            Outcome(trial, Group(tuple(done[run] for run in names if run in done)), len(seeds), examples)
            for trial in same
            for names in [[_run_name(trial, seed) for seed in seeds]]
        ]
        choice = Choice.of(outcomes)
        if choice is None:
            raise RunError(f"every trial of {name} diverged: try lower learning rates in another folder.")
        choices[name] = choice
    chosen = {name: choice.chosen.trial.name for name, choice in choices.items()}
    if before is None:
        _save(path / CHOSEN, {"chosen": chosen, "diverged": failed, "examples": examples})
    return choices, failed


def _save(path: Path, content: dict[str, Any]) -> None:
    """Rank 0 writes the file."""

    def work() -> Part:
        if join().rank == 0:
            write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())
        return Part()

    join().gather(f"writing {path.name}", work)


def _examples(experiment: Experiment, data_dir: Path | None) -> int | None:
    """The number of held-out examples of the first seed. None if the score is not a mean over examples."""
    _, scored = load_federation(experiment, data_dir)
    plain = scored is not None and not experiment.personal and getattr(scored.targets, "ndim", 0) == 1
    return len(scored) if plain and scored is not None else None


def _carry_out(
    folder: Path,
    runs: Mapping[str, Experiment],
    data_dir: Path | None,
    play: Play,
    laid_out: Callable[[], None] = lambda: None,
) -> Played:
    """The finished runs. All are checked before the first folder is made."""
    paths = {name: folder / name for name in runs}
    for name, path in paths.items():
        if (path / "config.toml").exists():
            refuse_another(path, runs[name])
    finished = take_up({paths[name]: experiment for name, experiment in runs.items()}, data_dir)
    laid_out()
    done = {name: finished[path] for name, path in paths.items() if path in finished}
    left = {name: path for name, path in paths.items() if name not in done}
    fresh, failed = play(left) if left else ({}, {})
    return done | fresh, failed


def _resume_all(paths: dict[str, Path], data_dir: Path | None) -> Played:
    done: dict[str, Summary] = {}
    failed: dict[str, FedParaError] = {}
    for name, path in paths.items():
        try:
            done[name] = resume(path, data_dir=data_dir)
        except FedParaError as error:
            if join().over:
                raise
            failed[name] = error
    return done, failed
