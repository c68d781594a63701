"""Study: one table or figure of the paper. Each cell has the paper's number and the source of ours.

    Cell("FedPara", "CIFAR-10 IID", 82.88, (experiment,), accuracy)

`measure` receives the Summary of one run per experiment, cut to the rounds of the experiment. A cell without
experiments is computed and needs no training. A Ratio takes two experiments. Cells with equal experiments share a run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from fedpara.experiments.config import Experiment

Measure = Callable[..., float | None]
"""Maps summaries of runs to a number, or to None if a target was not reached."""


@dataclass(frozen=True)
class Ratio:
    """mean(first) / mean(second) of a cell's two experiments, each over all its seeds."""

    first: Measure
    second: Measure


Figure = Literal["curves", "gamma", "bars", "histogram", "none"]


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    paper: float | str | None  # None if the paper prints no number
    experiments: tuple[Experiment, ...]
    measure: Measure | Ratio
    style: str = "%"  # format of both numbers: a key of STYLES in `report/tables.py`


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    source: str  # where in the paper
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    untuned: tuple[str, ...] = ()  # the notes that do not apply if all numbers are tuned
    seeds: int = 1  # as many as in the paper
    spread: Literal["std", "ci95"] = "std"
    figure: Figure = "curves"

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def experiments(self) -> list[Experiment]:
        """Each experiment once, with the most rounds that any cell needs."""
        return merged([e for cell in self.cells for e in cell.experiments])

    def changed(self, change: Callable[[Experiment], Experiment]) -> "Study":
        """The study with changed experiments: another seed, fewer rounds, or a miniature."""
        cells = (replace(c, experiments=tuple(map(change, c.experiments))) for c in self.cells)
        return replace(self, cells=tuple(cells))


def merged(experiments: list[Experiment]) -> list[Experiment]:
    """Each experiment once, in order of appearance, with the most rounds among equal ones."""
    found: dict[str, Experiment] = {}
    for experiment in experiments:
        known = found.get(experiment.identity, experiment)
        found[experiment.identity] = replace(known, rounds=max(known.rounds, experiment.rounds))
    return list(found.values())


_SPLITS = {
    "dirichlet": "noniid",
    "dirichlet-capped": "noniid-capped",
    "owner": "noniid",
    "largest": "writers",
    "drawn": "drawn",
}
_NORMS = {"squared": "-squared", "network": "-network"}


def run_name(experiment: Experiment) -> str:
    """The name of the run folder: readable words, and part of the identity to make it unique."""
    e = experiment
    size = next((f"{v:g}" for v in (e.gamma, e.rank, e.ratio) if v is not None), "")
    words = [
        e.dataset.replace(":", "-"),
        _SPLITS.get(e.split, e.split),
        e.model,
        f"{e.scheme}{size}",
        *([e.nonlinearity] if e.nonlinearity else []),
        *([f"jacobian{e.jacobian:g}{_NORMS.get(e.jacobian_norm, '')}"] if e.jacobian else []),
        *([e.where.replace(":", "")] if e.where else []),
        *([f"share-{e.share}"] if e.share != "all" else []),
        *([f"data{e.data_fraction:g}"] if e.data_fraction < 1 else []),
        *([f"validation{e.validation:g}"] if e.validation else []),
        e.algorithm,
        *([e.link_up] if e.link_up != "float32" else []),
        f"seed{e.seed}",
        e.identity[:6],
    ]
    return "-".join(words)
