"""The paper's tables and figures by name. Each is a Study: cells with the paper's number and the source of ours.

runs("capacity-cnn", seed=0)      the experiments of the study, by the name of their run folder
STUDIES["capacity-cnn"].cells     the cells that they fill
"""

from collections.abc import Callable
from dataclasses import replace

from fedpara.errors import ConfigError, among
from fedpara.experiments.config import Experiment
from fedpara.experiments.paper import arithmetic, personal, text, variants, vision
from fedpara.experiments.paper.recipe import RECIPE, SETTINGS, superseded
from fedpara.experiments.paper.study import Cell, Ratio, Study, merged, run_name
from fedpara.experiments.paper.tiny import tiny

_ORDER = (
    *("rank-histogram", "table-sizes", "gamma-sizes", "capacity-cnn", "capacity-lstm", "communication"),
    *(
        "gamma-sweep",
        "optimizers",
        "personalization",
        "techniques",
        "jacobian",
        "round-time",
        "training-time",
        "long-run",
    ),
    *("resnet", "pufferfish", "lstm", "quantization"),
)
_ALL = {s.name: s for part in (arithmetic, vision, variants, text, personal) for s in part.STUDIES}

STUDIES: dict[str, Study] = {name: _ALL[name] for name in _ORDER}


def study(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"unknown study {name!r}: {among(name, STUDIES)}")
    return STUDIES[name]


def changes(
    seed: int = 0, rounds: int | None = None, scale: str = "paper"
) -> Callable[[Experiment], Experiment]:
    """A function that gives an experiment another seed or number of rounds, or makes it a miniature."""
    if scale not in ("paper", "tiny"):
        raise ConfigError(f"scale is {scale!r}: expected paper or tiny.")

    def change(experiment: Experiment) -> Experiment:
        small = tiny(experiment) if scale == "tiny" else experiment
        return replace(small, seed=seed, rounds=small.rounds if rounds is None else rounds)

    return change


def runs(name: str, seed: int = 0, rounds: int | None = None, scale: str = "paper") -> dict[str, Experiment]:
    """The experiments of a table or figure, each once, by the name of its run folder."""
    wanted = study(name).changed(changes(seed, rounds, scale)).experiments
    return {run_name(experiment): experiment for experiment in wanted}


__all__ = [
    "RECIPE",
    "SETTINGS",
    "STUDIES",
    "Cell",
    "Ratio",
    "Study",
    "changes",
    "merged",
    "run_name",
    "runs",
    "study",
    "superseded",
    "tiny",
]
