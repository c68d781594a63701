"""Tables: the cells of a study with the numbers of our runs. Each number is read from run folders or computed.

± is the standard deviation over seeds. Where the paper gives 95% confidence intervals, it is the half width
t(0.975, n - 1) s / sqrt(n). A ratio is mean(a) / mean(b), each over all seeds of its runs. Its ± is

    (mean(a) / mean(b)) sqrt((s_a / mean(a))^2 + (s_b / mean(b))^2)

(first-order error propagation). s_a and s_b are the ± of the two means; a mean of one seed adds nothing.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

from fedpara.experiments import Experiment
from fedpara.experiments.paper import Cell, Ratio, Study, changes, superseded
from fedpara.experiments.paper.measures import WITHOUT_TARGET
from fedpara.experiments.paper.study import Measure
from fedpara.experiments.paper.tiny import MINIATURE, ROUNDS
from fedpara.experiments.seeds import half_width
from fedpara.experiments.storage.catalog import Library

Change = Callable[[Experiment], Experiment]
COMPARISONS = ("capacity-cnn", "communication", "gamma-sweep", "training-time")
"""Studies whose rows are methods, each with its own chosen setting. The others vary one recipe: their numbers are tuned
only if all of them are."""
TRIALS = (
    "A cell with a number of trials is tuned: so many settings of its method were compared by validation."
)
REUSED = (
    "A reused setting was not tuned for the cell itself: it is the one that validation chose for the same method on "
    "the same data (for FedPara at γ 0.1)."
)
NOT_RUN = "not run here"
TO_RUN_AGAIN = "to be run again"
"""There is a run, but its experiment was corrected later."""
NOT_REACHED = "not reached"
NOT_SCORED = "not scored"
NO_NUMBER = "–"

STYLES: dict[str, Callable[[float], str]] = {
    "%": lambda v: f"{v:.2f}",
    "%0": lambda v: f"{v:.0f}%",
    "1": lambda v: f"{v:.1f}",
    "2": lambda v: f"{v:.2f}",
    "g": lambda v: f"{v:.3g}",
    "4": lambda v: f"{v:.4g}" if abs(v) < 1e4 else f"{v:.0f}",
    "n": lambda v: f"{v:.0f}",
    "K": lambda v: f"{v / 1e3:.0f} K",
    "M": lambda v: f"{v / 1e6:.2f} M",
    "x1": lambda v: f"{v:.1f}×",
    "x2": lambda v: f"{v:.2f}×",
    "s": lambda v: f"{v:.2f} s",
    "min": lambda v: f"{v:.2f} min",
    "+": lambda v: f"{v:+.2f}",
}


@dataclass(frozen=True)
class Sample:
    """The values over seeds, and the number of `seeds` that were run. Some may lack a value."""

    values: tuple[float, ...]
    seeds: int

    @property
    def count(self) -> str:
        return str(self.seeds) if len(self.values) == self.seeds else f"{len(self.values)} of {self.seeds}"


@dataclass(frozen=True)
class Entry:
    """A cell with our number. A ratio has two samples, every other cell one. `runs` are names of run folders."""

    row: str
    column: str
    paper: float | str | None
    value: float | None
    spread: float | None
    style: str
    samples: tuple[Sample, ...]
    runs: tuple[str, ...] = ()
    computed: bool = False
    aimed: bool = False  # its measure has a target, which a run may miss
    superseded: bool = False  # its only runs belong to an experiment that was corrected later
    trials: int = 0  # how many settings were tried by validation; 0 if it was not tuned
    reused: bool = False  # the trials are those of another experiment of the same method
    note: str = ""  # follows the number
    chosen: bool = False  # the best trial of a method
    missing: str = NOT_SCORED  # in place of a number that runs do not have

    @property
    def seeds(self) -> int:
        """The seeds that were run: the smaller number for a ratio, 0 if the cell is computed."""
        return min(sample.seeds for sample in self.samples)

    @property
    def paper_text(self) -> str:
        if self.paper is None:
            return NO_NUMBER
        return self.paper if isinstance(self.paper, str) else STYLES[self.style](self.paper)

    @property
    def number_text(self) -> str:
        """Our number with its ±, or why there is none."""
        if self.value is None:
            if self.superseded:
                return TO_RUN_AGAIN
            return (NOT_REACHED if self.aimed else self.missing) if self.seeds else NOT_RUN
        text = STYLES[self.style](self.value)
        if self.spread is not None:
            text += f" ± {STYLES[self.style](self.spread).strip('+×%KMsmin ')}"
        return text

    @property
    def seeds_text(self) -> str:
        if self.value is None:
            return NO_NUMBER
        return "computed" if self.computed else " and ".join(sample.count for sample in self.samples)

    @property
    def origin(self) -> str:
        """The seeds of a trained number and the trials of its setting: 3 seeds, 7 trials."""
        if self.value is None or not self.seeds:
            return ""
        (sample, *more) = self.samples
        seeds = [] if more or sample.count != str(sample.seeds) else [_count(sample.seeds, "seed")]
        trials = [("reused setting of " if self.reused else "") + _count(self.trials, "trial")] * bool(
            self.trials
        )
        return ", ".join(seeds + trials)

    @property
    def text(self) -> str:
        """Our number, and its seeds if they differ from those of the table."""
        return self.number_text + ("" if self.value is None else self._counted) + self.note

    @property
    def _counted(self) -> str:
        counts = [sample.count for sample in self.samples]
        if len(counts) > 1:
            each = f"{counts[0]} seed{'s' * (counts[0] != '1')} each"
            return f" ({each if len(set(counts)) == 1 else ' and '.join(counts) + ' seeds'})"
        (sample,) = self.samples
        return f" ({sample.count} seeds)" if sample.seeds > len(sample.values) else ""


@dataclass(frozen=True)
class Replacement:
    """The setting that validation chose out of `trials`, with the seeds of its final runs.

    It is `reused` if the trials are those of another experiment of the same method, such as another gamma.
    """

    experiment: Experiment
    seeds: tuple[int, ...]
    trials: int
    reused: bool = False
    note: str = ""


Tuned = Callable[[Experiment], Replacement | None]
"""Maps an experiment of the paper, at seed 0, to its chosen setting."""


@dataclass(frozen=True)
class Table:
    """A study with our numbers. `caveat` says how our runs differ from the paper's."""

    study: Study
    entries: tuple[Entry, ...]
    caveat: str = ""

    def at(self, row: str, column: str) -> Entry | None:
        return next((e for e in self.entries if (e.row, e.column) == (row, column)), None)

    @property
    def of_paper(self) -> bool:
        """Whether the paper prints a number for any cell."""
        return any(entry.paper is not None for entry in self.entries)

    @property
    def run(self) -> int:
        """The number of cells with a number of ours."""
        return sum(entry.value is not None for entry in self.entries)


def table_of(
    study: Study,
    library: Library,
    seeds: Iterable[int],
    rounds: int | None = None,
    scale: str = "paper",
    tuned: Tuned | None = None,
) -> Table:
    """The study with those runs of the given seeds that the library has.

    `tuned` replaces experiments by their chosen settings.
    """
    repeats = [changes(seed, rounds, scale) for seed in seeds]
    plain = tuple(_entry(cell, study, library, repeats) for cell in study.cells)
    found = [_tuned_entry(cell, study, library, scale, tuned) if tuned else None for cell in study.cells]
    entries = tuple(new[0] if new else old for new, old in zip(found, plain, strict=True))
    mixed = any(entry.value is not None and not (entry.trials or entry.computed) for entry in entries)
    if mixed and study.name not in COMPARISONS:
        entries, found = plain, [None for _ in plain]
    notes = [note for note in study.notes if note not in study.untuned or mixed or not any(found)]
    notes += dict.fromkeys(note for new in found if new for note in new[1])
    caveat = _caveat(rounds, scale) if any(entry.seeds for entry in entries) else ""
    return Table(replace(study, notes=tuple(notes)), entries, caveat)


def _tuned_entry(
    cell: Cell, study: Study, library: Library, scale: str, tuned: Tuned
) -> tuple[Entry, list[str]] | None:
    """The entry of the chosen settings with its notes, if all of the cell's experiments have one and were run."""
    small = changes(0, None, scale)
    found = [tuned(small(experiment)) for experiment in cell.experiments]
    chosen = [one for one in found if one is not None]
    if not chosen or len(chosen) < len(found):
        return None
    lengths = [small(experiment).rounds for experiment in cell.experiments]
    experiments = tuple(
        replace(new.experiment, rounds=rounds) for new, rounds in zip(chosen, lengths, strict=True)
    )
    seeds = sorted({seed for one in chosen for seed in one.seeds})
    repeats = [_seeded(seed) for seed in seeds]
    entry = _entry(replace(cell, experiments=experiments), study, library, repeats)
    if not entry.seeds:
        return None
    reused = any(one.reused for one in chosen)
    notes = [TRIALS, *([REUSED] if reused else []), *(one.note for one in chosen if one.note)]
    return replace(entry, trials=min(one.trials for one in chosen), reused=reused), notes


def _seeded(seed: int) -> Change:
    return lambda experiment: replace(experiment, seed=seed)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _caveat(rounds: int | None, scale: str) -> str:
    count = rounds or ROUNDS
    length = f"{count} round{'s' * (count != 1)}"
    if scale == "tiny":
        return f"{MINIATURE}, {length}"
    return "" if rounds is None else f"ours is after {length}"


def spread_of(values: Sequence[float], kind: str) -> float | None:
    """± of a mean, or None for fewer than two values."""
    if len(values) < 2:
        return None
    # With the three decimals of printed tables of t, published numbers stay as they are.
    return half_width(values, decimals=3) if kind == "ci95" else stdev(values)


def ratio(a: Sequence[float], b: Sequence[float], kind: str = "std") -> tuple[float, float | None]:
    """(mean(a) / mean(b), its ±) by the formula above."""
    value = mean(a) / mean(b)
    parts = [spread / mean(side) for side in (a, b) if (spread := spread_of(side, kind)) is not None]
    return value, value * math.hypot(*parts) if parts else None


def _entry(cell: Cell, study: Study, library: Library, repeats: Sequence[Change]) -> Entry:
    if not cell.experiments:
        assert not isinstance(cell.measure, Ratio)
        value = cell.measure()
        assert value is not None
        return Entry(
            cell.row, cell.column, cell.paper, value, None, cell.style, (Sample((value,), 0),), computed=True
        )
    if isinstance(cell.measure, Ratio):
        measures = (cell.measure.first, cell.measure.second)
        pairs = zip(measures, cell.experiments, strict=True)
        read = [_sample(measure, (experiment,), library, repeats) for measure, experiment in pairs]
    else:
        read = [_sample(cell.measure, cell.experiments, library, repeats)]
    samples = tuple(sample for sample, _ in read)
    number: float | None = None
    spread: float | None = None
    if all(sample.values for sample in samples):
        number, spread = (
            ratio(samples[0].values, samples[1].values, study.spread)
            if len(samples) > 1
            else (mean(samples[0].values), spread_of(samples[0].values, study.spread))
        )
    return Entry(
        cell.row,
        cell.column,
        cell.paper,
        number,
        spread,
        cell.style,
        samples,
        tuple(dict.fromkeys(name for _, names in read for name in names)),
        aimed=cell.measure not in WITHOUT_TARGET,
        superseded=number is None and _superseded(cell, library, repeats),
    )


def _sample(
    measure: Measure, experiments: Sequence[Experiment], library: Library, repeats: Sequence[Change]
) -> tuple[Sample, list[str]]:
    """The measure for each seed with all of these runs, and the names of the runs."""
    values: list[float] = []
    names: list[str] = []
    seeds = 0
    for change in repeats:
        found = [library.find(change(experiment)) for experiment in experiments]
        runs = [run for run in found if run is not None]
        if len(runs) < len(found):
            continue
        seeds += 1
        names += map(library.name_of, runs)
        value = measure(*runs)
        if value is not None:
            values.append(value)
    return Sample(tuple(values), seeds), names


def _superseded(cell: Cell, library: Library, repeats: Sequence[Change]) -> bool:
    """Whether the library has only a version of a run from before a correction."""
    return any(
        library.find(change(experiment)) is None and library.find(change(old)) is not None
        for experiment in cell.experiments
        if (old := superseded(experiment)) is not None
        for change in repeats
    )
