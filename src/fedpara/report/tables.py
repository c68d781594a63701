"""Tables: a study's cells with the runs that are there. Every "ours" is read from a run folder or computed.

± is the sample's standard deviation over seeds, or where the paper gives 95% confidence intervals the half
width t(0.975, n - 1) s / sqrt(n).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from fedpara.experiments import Experiment
from fedpara.experiments.library import Library
from fedpara.experiments.paper import Cell, Study, changes
from fedpara.experiments.paper.measures import UNAIMED
from fedpara.experiments.paper.tiny import MINIATURE, ROUNDS

Change = Callable[[Experiment], Experiment]
NOT_RUN = "not run here"
NOT_REACHED = "not reached"
NOT_SCORED = "not scored"
NO_NUMBER = "–"

STYLES: dict[str, Callable[[float], str]] = {
    "%": lambda v: f"{v:.2f}",
    "%0": lambda v: f"{v:.0f}%",
    "1": lambda v: f"{v:.1f}",
    "2": lambda v: f"{v:.2f}",
    "g": lambda v: f"{v:.3g}",
    "n": lambda v: f"{v:.0f}",
    "K": lambda v: f"{v / 1e3:.0f} K",
    "M": lambda v: f"{v / 1e6:.2f} M",
    "x1": lambda v: f"{v:.1f}×",
    "x2": lambda v: f"{v:.2f}×",
    "s": lambda v: f"{v:.2f} s",
    "min": lambda v: f"{v:.2f} min",
    "+": lambda v: f"{v:+.2f}",
}
# t(0.975) by degrees of freedom, 1 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


@dataclass(frozen=True)
class Entry:
    """One cell as read. `values` holds one number a seed that reached its target; `runs` the folders' names."""

    row: str
    column: str
    paper: float | str | None
    values: tuple[float, ...]
    seeds: int  # that were run, 0 for what is computed
    spread: float | None
    style: str
    runs: tuple[str, ...]
    computed: bool
    aimed: bool = False  # at a target, which may not be reached

    @property
    def value(self) -> float | None:
        return mean(self.values) if self.values else None

    @property
    def paper_text(self) -> str:
        if self.paper is None:
            return NO_NUMBER
        return self.paper if isinstance(self.paper, str) else STYLES[self.style](self.paper)

    @property
    def text(self) -> str:
        if self.value is None:
            return (NOT_REACHED if self.aimed else NOT_SCORED) if self.seeds else NOT_RUN
        text = STYLES[self.style](self.value)
        if self.spread is not None:
            text += f" ± {STYLES[self.style](self.spread).strip('+×%KMsmin ')}"
        if self.seeds > len(self.values):
            text += f" ({len(self.values)} of {self.seeds} seeds)"
        return text


@dataclass(frozen=True)
class Table:
    """`caveat` says what ours is, where it is not what the paper did."""

    study: Study
    entries: tuple[Entry, ...]
    caveat: str = ""

    def at(self, row: str, column: str) -> Entry | None:
        return next((e for e in self.entries if (e.row, e.column) == (row, column)), None)

    @property
    def of_paper(self) -> bool:
        """Whether the paper prints a number for any of it."""
        return any(entry.paper is not None for entry in self.entries)

    @property
    def run(self) -> int:
        """How many entries have a number of ours."""
        return sum(entry.value is not None for entry in self.entries)


def table_of(
    study: Study,
    library: Library,
    seeds: Iterable[int],
    rounds: int | None = None,
    scale: str = "paper",
) -> Table:
    """The study with every seed of `seeds` that the library has."""
    repeats = [changes(seed, rounds, scale) for seed in seeds]
    entries = tuple(_entry(cell, study, library, repeats) for cell in study.cells)
    return Table(study, entries, _caveat(rounds, scale) if any(entry.seeds for entry in entries) else "")


def _caveat(rounds: int | None, scale: str) -> str:
    count = rounds or ROUNDS
    told = f"{count} round{'s' * (count != 1)}"
    if scale == "tiny":
        return f"{MINIATURE}, {told}"
    return "" if rounds is None else f"ours is after {told}, as was asked for"


def half_width(values: Sequence[float]) -> float:
    """t(0.975, n - 1) s / sqrt(n)"""
    n = len(values)
    return _t(n - 1) * stdev(values) / math.sqrt(n)


def _t(freedom: int) -> float:
    """t(0.975, v): the table's, and beyond it z + (z^3 + z) / 4v + (5 z^5 + 16 z^3 + 3 z) / 96 v^2."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _entry(cell: Cell, study: Study, library: Library, repeats: Sequence[Change]) -> Entry:
    values: list[float] = []
    names: list[str] = []
    seeds = 0
    for change in repeats if cell.experiments else ():
        found = [library.find(change(experiment)) for experiment in cell.experiments]
        runs = [run for run in found if run is not None]
        if len(runs) < len(found):
            continue
        seeds += 1
        names += map(library.name_of, runs)
        value = cell.measure(*runs)
        if value is not None:
            values.append(value)
    if not cell.experiments:
        value = cell.measure()
        assert value is not None
        values.append(value)
    many = len(values) > 1
    spread = (half_width(values) if study.spread == "ci95" else stdev(values)) if many else None
    return Entry(
        cell.row,
        cell.column,
        cell.paper,
        tuple(values),
        seeds,
        spread,
        cell.style,
        tuple(dict.fromkeys(names)),
        not cell.experiments,
        cell.measure not in UNAIMED,
    )
