"""Plan: what one prepared study runs.

    Tuning    methods on the same data; each gets the same trials, and its best one by validation gets final runs
    reused    experiments of the paper that run with the chosen setting of their method, without trials of their own

A method's setting is the set of values in which its chosen trial differs from its experiment. An experiment of the same
method, such as another gamma, uses these values wherever it has the method's original value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from fedpara.experiments.config import FREE, Experiment
from fedpara.experiments.paper import tiny
from fedpara.experiments.studies.trials import PROTOCOL, Grid, Trial, all_trials

SAME_METHOD = (
    *("dataset", "model", "scheme", "share", "personal"),
    *("split", "alpha", "clients", "keep", "cohort", "data_fraction", "epochs", "steps", "batch_size"),
)
"""Fields in which an experiment must agree with a method to use its setting."""


@dataclass(frozen=True)
class Tuning:
    """A tuning. `fills` are the paper's experiments that each method's final runs stand for; by default its own."""

    name: str  # of the folders: tuning/NAME and final/NAME
    methods: Mapping[str, Experiment]
    grid: Grid
    own: Mapping[str, Grid] = field(default_factory=dict)
    one_at_a_time: bool = True
    validation: float = 0.1
    rounds: int = 40
    seeds: tuple[int, ...] = (100,)
    final_seeds: tuple[int, ...] = (1, 2, 3)
    fills: Mapping[str, Experiment] | None = None
    title: str = ""  # in reports; by default the data set and its split
    note: str = ""  # how the runs differ from the experiments that they fill

    @property
    def trials(self) -> dict[str, list[Trial]]:
        protocol = {"validation": self.validation, "seed": self.seeds[0], "rounds": self.rounds}
        return all_trials(self.methods, self.grid, self.own, self.one_at_a_time, protocol)

    @property
    def filled(self) -> Mapping[str, Experiment]:
        """The paper's experiment of each method that has one."""
        return self.methods if self.fills is None else self.fills

    def finals(self, seeds: int | None = None) -> tuple[int, ...]:
        """The seeds of the final runs, at most the first `seeds`."""
        return self.final_seeds[:seeds]


@dataclass(frozen=True)
class Plan:
    """A plan of tunings and reused experiments. `needs` are tunings of other plans whose settings are reused."""

    name: str
    title: str
    tunings: tuple[Tuning, ...] = ()
    reused: tuple[Experiment, ...] = ()
    needs: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1,)  # of the reused experiments


@dataclass(frozen=True)
class Setting:
    """The setting that validation chose for a method out of `trials`."""

    tuning: str
    method: Experiment
    chosen: Experiment
    trials: int

    def applied(self, experiment: Experiment) -> Experiment | None:
        """The experiment with the setting of its method. None if it belongs to another method."""
        if any(getattr(experiment, name) != getattr(self.method, name) for name in SAME_METHOD):
            return None
        old, new, own = asdict(self.method), asdict(self.chosen), asdict(experiment)
        names = [name for name in old if old[name] != new[name] and name not in (*PROTOCOL, *FREE)]
        return replace(experiment, **{name: new[name] for name in names if own[name] == old[name]})


def setting_for(
    experiment: Experiment, settings: Iterable[Setting]
) -> tuple[Setting, Experiment] | tuple[None, None]:
    """(the setting of the experiment's method, the experiment with that setting)"""
    for setting in settings:
        applied = setting.applied(experiment)
        if applied is not None:
            return setting, applied
    return None, None


def miniature(plan: Plan) -> Plan:
    """The plan on generated data, with one round per trial, one trial seed and one final seed."""
    return replace(
        plan,
        tunings=tuple(map(_tiny_tuning, plan.tunings)),
        reused=tuple(unique(map(tiny, plan.reused))),
        seeds=plan.seeds[:1],
    )


def _tiny_tuning(tuning: Tuning) -> Tuning:
    def small(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
        return {name: tiny(experiment) for name, experiment in experiments.items()}

    return replace(
        tuning,
        methods=small(tuning.methods),
        fills=None if tuning.fills is None else small(tuning.fills),
        rounds=1,
        seeds=tuning.seeds[:1],
        final_seeds=tuning.final_seeds[:1],
    )


def unique(experiments: Iterable[Experiment]) -> Sequence[Experiment]:
    """Each experiment once: those with equal identity and rounds are the same."""
    return list({(e.identity, e.rounds): e for e in experiments}.values())
