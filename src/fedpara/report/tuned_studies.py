"""Tuned studies: run folders of trials and final runs, recognized by their folders.

tuning/STUDY/STUDY-METHOD-K-seedS    final/STUDY/METHOD-seedS    archived runs, as in results/; older ones have no seed
STUDY/trials/METHOD-K-seedS          STUDY/final/METHOD-seedS    a folder of `fedpara tune`
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpara.experiments import Experiment, Summary
from fedpara.experiments.config import FREE
from fedpara.experiments.paper.sizes import EXAMPLES
from fedpara.experiments.seeds import Group
from fedpara.experiments.storage.catalog import finished
from fedpara.experiments.studies.trials import Choice, Outcome, Trial
from fedpara.experiments.studies.tune import CHOSEN, held_out_examples
from fedpara.experiments.studies.tuned.plan import Setting, Tuning, setting_for
from fedpara.experiments.studies.tuned.plans import TUNINGS, tuning_of
from fedpara.report.series import data_of
from fedpara.report.tables import Replacement, Tuned

TITLES = {
    "original": "original",
    "lowrank": "low-rank",
    "fedpara": "FedPara",
    "narrow": "narrow dense VGG16",
    "local": "Local",
    "fedavg": "FedAvg",
    "fedper": "FedPer",
    "pfedpara": "pFedPara",
    **{f"gamma-{gamma}": f"γ {gamma}" for gamma in ("0.25", "0.5", "0.75")},
    **{f"w2-{start}": f"γ 0.5, W2 starts at {start}" for start in ("0.3", "2")},
    **{f"only-{layer}": f"γ 0.5, only {layer} factorized" for layer in ("fc1", "fc2")},
}
"""How the tables name the methods of the paper's studies, in this order."""
FINAL_SEEDS = (1, 2, 3, 4, 5)
"""Seeds that did not take part in a choice. Seed 0 chose the first recipe."""
_TRIAL = re.compile(r"(?P<method>.+?)-(?P<number>\d+)(?:-seed\d+)?")
_FINAL = re.compile(r"(?P<method>.+)-seed\d+")
_SAME = ("seed", "validation", "evaluate_every", *FREE)
"""Fields in which a final run may differ from its trial."""


@dataclass(frozen=True)
class Method:
    """A method's trials and runs. `finals` are final runs of the chosen setting, `strays` those of others."""

    name: str
    outcomes: tuple[Outcome, ...]
    runs: tuple[Summary, ...]

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    @cached_property
    def choice(self) -> Choice | None:
        return Choice.of(self.outcomes)

    @property
    def finals(self) -> tuple[Summary, ...]:
        return tuple(run for run in self.runs if self._is_chosen(run.experiment))

    @property
    def strays(self) -> tuple[Summary, ...]:
        return tuple(run for run in self.runs if not self._is_chosen(run.experiment))

    def _is_chosen(self, experiment: Experiment) -> bool:
        if self.choice is None:
            return False
        return _setting(experiment) == _setting(self.choice.chosen.trial.experiment)


@dataclass(frozen=True)
class TunedStudy:
    """The methods that were tuned on the same data."""

    folder: Path
    methods: tuple[Method, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def title(self) -> str:
        tuning = TUNINGS.get(self.name)
        return tuning.title if tuning and tuning.title else data_of(self.first)

    @property
    def first(self) -> Experiment:
        return self.methods[0].outcomes[0].trial.experiment

    @property
    def is_fair(self) -> bool:
        """Whether all methods have the same number of trials, and all trials the same number of seeds."""
        return len({len(method.outcomes) for method in self.methods}) == 1 and self.has_all_seeds

    @property
    def has_all_seeds(self) -> bool:
        return len({one.seeds for method in self.methods for one in method.outcomes}) == 1


def _setting(experiment: Experiment) -> dict[str, Any]:
    return {name: value for name, value in asdict(experiment).items() if name not in _SAME}


def tuned_studies(library: Iterable[Summary]) -> list[TunedStudy]:
    """The studies that have trials, in the order of their runs."""
    trials: dict[Path, dict[str, dict[int, list[Summary]]]] = {}
    finals: dict[Path, dict[str, list[Summary]]] = {}
    for run in library:
        place = _place(run.path)
        if place is None:
            continue
        study, method, number = place
        if number is not None:
            trials.setdefault(study, {}).setdefault(method, {}).setdefault(number, []).append(run)
        elif finished(run, run.experiment.rounds) and not run.experiment.validation:
            finals.setdefault(study, {}).setdefault(method, []).append(run)
    order = [*TITLES]
    found = []
    for study, methods in trials.items():
        ends, examples = finals.get(study, {}), held_out_examples(study)
        names = sorted(methods, key=lambda name: order.index(name) if name in order else len(order))
        found.append(
            TunedStudy(
                study,
                tuple(
                    Method(name, _outcomes(name, methods[name], examples), _by_seed(ends.get(name, [])))
                    for name in names
                ),
            )
        )
    return found


def _place(path: Path) -> tuple[Path, str, int | None] | None:
    """(study, method, number of the trial or None for a final run), or None for another run."""
    parent, above = path.parent, path.parent.parent
    if above.name == "tuning":
        study, name, kind = parent, path.name.removeprefix(f"{parent.name}-"), _TRIAL
        if name == path.name:
            return None
    elif above.name == "final":
        study, name, kind = above.parent / "tuning" / parent.name, path.name, _FINAL
    elif parent.name in ("trials", "final"):
        study, name, kind = above, path.name, _TRIAL if parent.name == "trials" else _FINAL
    else:
        return None
    fits = kind.fullmatch(name)
    return (study, fits["method"], int(fits["number"]) if kind is _TRIAL else None) if fits else None


def _by_seed(runs: Sequence[Summary]) -> tuple[Summary, ...]:
    return tuple(sorted(runs, key=lambda run: run.experiment.seed))


def _outcomes(
    method: str, runs: Mapping[int, Sequence[Summary]], examples: int | None
) -> tuple[Outcome, ...]:
    numbers = sorted(runs)
    varied = _varied([runs[number][0].experiment for number in numbers])
    return tuple(
        Outcome(
            Trial(method, number, values, runs[number][0].experiment),
            Group(tuple(run for run in _by_seed(runs[number]) if finished(run, run.experiment.rounds))),
            len(runs[number]),
            examples or _held_out(runs[number][0].experiment),
        )
        for number, values in zip(numbers, varied, strict=True)
    )


def _varied(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """The values that name each trial: the one that differs from the first trial, or all if several differ."""
    settings = [_setting(experiment) for experiment in experiments]
    first = settings[0]
    changed = [{name: v for name, v in own.items() if v != first[name]} for own in settings]
    if all(len(values) == 1 for values in changed[1:]):
        return changed
    names = sorted({name for values in changed for name in values})
    return [{name: own[name] for name in names} for own in settings]


def _held_out(experiment: Experiment) -> int | None:
    """The approximate number of examples behind a score, if the data set is one of the paper's."""
    count = EXAMPLES.get(experiment.dataset)
    known = count and experiment.keep is None and not experiment.personal
    return round(count * experiment.data_fraction * experiment.validation) if known and count else None


def settings(studies: Iterable[TunedStudy], scale: str = "paper") -> list[Setting]:
    """The settings that prepared studies have chosen: every method has all of its trials."""
    found = []
    for study in studies:
        tuning = tuning_of(study.name, scale)
        if tuning is None or not _is_complete(study, tuning):
            continue
        for method in study.methods:
            if method.choice is not None:
                chosen = method.choice.chosen.trial.experiment
                found.append(Setting(tuning.name, tuning.methods[method.name], chosen, len(method.outcomes)))
    return found


def _is_complete(study: TunedStudy, tuning: Tuning) -> bool:
    """Whether all trials have ended. Once the choice is made, a trial without a score has diverged."""
    trials = {name: len(listed) for name, listed in tuning.trials.items()}
    ended = all(outcome.score is not None for method in study.methods for outcome in method.outcomes)
    return {method.name: len(method.outcomes) for method in study.methods} == trials and (
        ended or (study.folder / CHOSEN).exists()
    )


def replacements(studies: Sequence[TunedStudy], scale: str = "paper") -> Tuned:
    """Gives an experiment of the paper its chosen setting, if a prepared study has one.

    This is the setting whose final runs stand for the experiment, or else its method's setting on the same data.
    """
    filled = {}
    for study in studies:
        tuning = tuning_of(study.name, scale)
        for method in study.methods if tuning is not None and study.is_fair else ():
            if method.name in tuning.filled and method.finals:  # type: ignore[union-attr]
                of_paper = tuning.filled[method.name]  # type: ignore[union-attr]
                filled[replace(of_paper, seed=0).identity] = Replacement(
                    method.finals[0].experiment,
                    tuple(run.experiment.seed for run in method.finals),
                    len(method.outcomes),
                    note=tuning.note,  # type: ignore[union-attr]
                )
    known = settings(studies, scale)

    def of(experiment: Experiment) -> Replacement | None:
        direct = filled.get(experiment.identity)
        if direct is not None:
            return direct
        setting, applied = setting_for(experiment, known)
        if setting is None or applied is None:
            return None
        own = replace(setting.method, seed=0).identity == experiment.identity
        return Replacement(applied, FINAL_SEEDS, setting.trials, reused=not own)

    return of
