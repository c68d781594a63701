"""docs/frontier.md: accuracy against metered bytes, one section per scale and stage of the study.

fedpara report results/frontier results/tuning results/final --out docs/frontier.md
fedpara report results/frontier results/tuning results/final --format svg --out docs/assets

The first folder makes it this page. The others have runs that other studies share with this one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from fedpara.experiments.config import Experiment
from fedpara.experiments.paper.measures import GIGABYTE
from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.frontier.combinations import Scale
from fedpara.experiments.studies.frontier.cost import parameters
from fedpara.experiments.studies.frontier.study import (
    ALL_SCALES,
    LOSS,
    TRIAL_SEED,
    Point,
    Stage,
    front,
    leanest,
    points,
)
from fedpara.report.frontier_figure import frontier_figure
from fedpara.report.own import Unit
from fedpara.report.series import data_of
from fedpara.report.tables import NOT_REACHED, ratio, spread_of

UNITS = (Unit("GB", GIGABYTE), Unit("MB", 2**20), Unit("kB", 2**10))
"""Binary units, as in Figure 3 of the paper."""
_KIND = re.compile(r" \(([^()]*Dirichlet)\)$")
HEADINGS = ("combination", "accuracy [%]", "seeds", "rate", "up", "down", "to the target", "times fewer")

ABOUT = """\
This page shows how accurate a model is after so many bytes, for combinations of networks and links. A combination is a
network, the link up / the link down, and options. `fedpara0.1 eden/int8` is FedPara with γ 0.1, EDEN
with one bit up and int8 down. `topk5` sends the largest 5%, `stc5` their signs, and `+` is error feedback. `grid0.25`
rounds the model to steps of a quarter of each tensor's root mean square, and sends how far it moved. With `h86` the
step halves in 86 rounds. `fedparamixed` is a [γ per client](guides/aggregation.md), 0.1, 0.2 and 0.4. `refit` averages
weights in place of factors.
[Send fewer bytes](guides/compression.md) describes the links. Learning rates are chosen by validation, with the same
trials for every combination. `fedpara reproduce frontier` runs all of this.

Bytes are those of all encoded messages, both ways, with what clients receive that missed rounds. A GB is 2³⁰ bytes, as
in Figure 3 of the paper. ± is the standard deviation over the seeds. Bold combinations are on the Pareto front of bytes
and accuracy after the last round. "Times fewer" compares the bytes until the target is first reached with those of
`original f32/f32`: it is the ratio of the means. A combination with one seed adds nothing to its ±."""

ABOUT_FEDMUD = """\
## FedMUD's protocol

[FedMUD](https://arxiv.org/abs/2505.23176) (ICML 2025) compares methods that train a small share of the parameters:
CIFAR-10, 100 clients, 10 per round, labels by Dirichlet 0.3, 3 epochs, batch 64, 200 rounds, plain SGD with a constant
rate, 1/32 of the parameters. `fedpara reproduce fedmud` runs it. `--scale digits` is a miniature that also clips
gradients.

| method | |
| --- | --- |
| `fedavg` | whole weights |
| `lowrank` | W = X Yᵀ, as in FedHM; kernels as matrices |
| `fedpara` | FedPara with one rank for all weights |
| `mud` | the [update form](guides/update-form.md): base + X Yᵀ, folded after every round |
| `mud+bkd` | the same with blocks of Kronecker products |
| `mud+bkd+aad` | the same with sums that average exactly |

Sizes follow FedMUD's code: all trained parameters, with the dense ones, are at most the ratio plus 0.001 of FedAvg's.
The first and the last layer stay dense. Four things differ from FedMUD:

- Its network has ten 3 × 3 convolutions of 32 to 512 channels with BatchNorm, and one linear layer. The nearest one
  here is `vgg16-half`, a VGG16 of half the width with GroupNorm.
- Every method has the same trials of its learning rate, by validation. FedMUD also tunes the size of the random
  factors.
- The score is that of the last round, not the best one on the test set.
- Clients that missed folds receive them. These bytes count: with a fold after every round, they are most of what is
  sent down.

"Times fewer" compares with `fedavg`."""


@dataclass(frozen=True)
class Section:
    """The points of one scale and stage."""

    scale_name: str
    stage: Stage
    points: Sequence[Point]

    @property
    def scale(self) -> Scale:
        return ALL_SCALES[self.scale_name]

    @property
    def name(self) -> str:
        return f"frontier-{self.scale_name}-{self.stage}"

    @property
    def target(self) -> float:
        return self.scale.trial_target if self.stage == "validation" else self.scale.target

    @property
    def rounds(self) -> int:
        return max(run.rounds for point in self.points for run in point.runs)

    @property
    def title(self) -> str:
        what = f"{data_of(self.scale.base)}, {self.scale.base.model.rpartition(':')[2]}"
        protocol = "FedMUD's protocol, " * (self.scale.ratio is not None)
        return f"{protocol}{what}, {self.stage}, {self.rounds} rounds"

    @property
    def heading(self) -> str:
        """The title without what the first sentence says: the network and the kind of split."""
        protocol = "FedMUD's protocol, " * (self.scale.ratio is not None)
        words = f"{protocol}{_KIND.sub('', data_of(self.scale.base))}, {self.stage}, {self.rounds} rounds"
        return words[0].upper() + words[1:]

    @property
    def compares(self) -> bool:
        """Whether the reference combination has a run."""
        return self.points[0].combination == self.scale.combinations[0]

    @property
    def unit(self) -> Unit:
        return unit_of(max(point.sent for point in self.points))


def unit_of(most: float) -> Unit:
    """The largest unit in which the largest number is at least 1."""
    return next((unit for unit in UNITS if most >= unit.bytes), UNITS[-1])


def frontier_sections(library: Library) -> list[Section]:
    """The sections of the page: final runs come before the trials that chose their rates."""
    stages: tuple[Stage, ...] = ("test", "validation")
    seeds = max((_number_of_seeds(run.experiment) for run in library), default=0)
    found = (
        Section(name, stage, points(scale, stage, library, seeds))
        for name, scale in ALL_SCALES.items()
        for stage in stages
        if stage == "validation" or scale.final_scale is None
    )
    return [section for section in found if section.points]


def _number_of_seeds(last: Experiment) -> int:
    """The number of seeds up to this one. Trials count from TRIAL_SEED, final runs from 1."""
    return last.seed - TRIAL_SEED + 1 if last.validation else last.seed


def rows(section: Section) -> tuple[list[str], list[list[str]]]:
    """(headings, rows): the fewest bytes to the target come first. ± is the standard deviation over the seeds."""
    unit, target = section.unit, section.target
    named = {
        "up": f"up [{unit.name}]",
        "down": f"down [{unit.name}]",
        "to the target": f"to {target:.0%} [{unit.name}]",
    }
    first = section.points[0].sent_to(target) if section.compares else None
    found = sorted(section.points, key=lambda one: _key(one, target))
    headings, body = [named.get(one, one) for one in HEADINGS], [_row(one, section, first) for one in found]
    if section.scale.ratio is not None:
        whole = parameters(section.scale, section.scale.combinations[0])
        headings.insert(1, "parameters")
        for point, row in zip(found, body, strict=True):
            count = parameters(section.scale, point.combination)
            row.insert(1, f"{count:,} ({count / whole:.2%})")
    return headings, body


def _key(point: Point, target: float) -> tuple[bool, float]:
    sent = point.sent_to(target)
    return sent is None, point.sent if sent is None else mean(sent)


def _row(point: Point, section: Section, first: Sequence[float] | None) -> list[str]:
    unit, runs = section.unit, point.runs
    sent = point.sent_to(section.target)
    reached = sum(run.reached(section.target) is not None for run in runs)
    some = NOT_REACHED if not reached else f"{reached} of {len(runs)} seeds"
    times, spread = ratio(first, sent) if first and sent else (None, None)
    if point is section.points[0]:
        spread = None  # compared with itself
    return [
        point.combination,
        _number(100 * point.accuracy, _spread([100 * a for a in point.accuracies]), 2),
        str(len(runs)),
        ", ".join(dict.fromkeys(f"{run.experiment.lr:g}" for run in runs)),
        f"{mean(run.bytes_up for run in runs) / unit.bytes:.3g}",
        f"{mean(run.bytes_down for run in runs) / unit.bytes:.3g}",
        some if sent is None else f"{mean(sent) / unit.bytes:.3g}",
        "–" if times is None else _number(times, spread, 1),
    ]


def _spread(values: Sequence[float]) -> float | None:
    return spread_of(values, "std")


def _number(value: float, spread: float | None, decimals: int) -> str:
    return f"{value:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")


def section_text(section: Section, assets: str = "assets") -> str:
    """A section of the page: what was run, the figure and the table."""
    headings, body = rows(section)
    best = {point.combination for point in front(section.points)}
    marked = [[f"**{row[0]}**" if row[0] in best else row[0], *row[1:]] for row in body]
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *marked]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    picture = f"{assets}/{section.name}.svg"
    return "\n\n".join(
        [
            f"## {section.heading}",
            _about(section),
            f'<div class="figure"><object type="image/svg+xml" data="{picture}"><img src="{picture}" alt="Accuracy '
            f'against bytes: {section.title}"></object></div>',
            table,
            *_unfinished(section),
            *_leanest(section),
        ]
    )


def _about(section: Section) -> str:
    e, scale = section.scale.base, section.scale
    setting = f"{len(section.points)} combinations of `{e.model.rpartition(':')[2]}`, {e.clients} clients, "
    setting += f"{e.cohort} per round."
    split = _KIND.search(data_of(e))
    if split and scale.ratio is None:
        setting += f" The split is {split[1]}."
    if scale.ratio is not None:
        local = f"Dirichlet {e.alpha:g}, {e.epochs} epochs, batch {e.batch_size}"
        setting += f" {local}, at most 1/{1 / scale.ratio:g} of the parameters."
    if section.stage == "test":
        return f"{setting} The scores are on the test set."
    rates = ", ".join(f"{rate:g}" for rate in scale.rates)
    one = f"Each had one trial, with rate {rates}."
    several = f"Each had a trial with each rate of {rates}, and its best one is shown."
    tried = (
        "Each had one trial. The rate and the other settings are those that tuning chose for\n"
        f"networks of its kind (`{scale.tuned}`, seven trials each)."
        if scale.tuned is not None
        else (several if len(scale.rates) > 1 else one)
    )
    repeated = any(len(point.runs) > 1 for point in section.points)
    more = " Some were repeated with further seeds, which chose nothing." * repeated
    return (
        f"{setting} {tried}{more} The scores are on\nthe {scale.validation:.1%} of every client's training data that "
        "the trials held out."
    )


def _unfinished(section: Section) -> list[str]:
    """A sentence on the methods of FedMUD's protocol whose final runs all ended early."""
    listed = {point.combination for point in section.points}
    missing = [f"`{name}`" for name in section.scale.combinations if name not in listed]
    if section.stage == "validation" or section.scale.ratio is None or not missing:
        return []
    return [f"No final run of {', '.join(missing)} reached the last round ([log](log.md#fedmuds-protocol))."]


def _leanest(section: Section) -> list[str]:
    """A sentence on the trials, if the reference combination is among them."""
    first, lean = section.points[0].combination, leanest(section.points)
    assert lean is not None
    compared = section.stage == "validation" and section.scale.ratio is None
    if not (compared and section.compares):
        return []
    repeated = any(len(point.runs) > 1 for point in section.points)
    near = f"at most {100 * LOSS:g} point to `{first}`{' with the first seed' * repeated}."
    if lean.combination == first:
        return [f"No combination sends fewer bytes and loses {near}"]
    return [f"`{lean.combination}` sends the fewest bytes of those that lose {near}"]


def frontier_document(sections: Sequence[Section], of: str, to: str) -> str:
    """The page. `of` and `to` are the arguments of `fedpara report`, which its first lines show."""
    fedmud = [section for section in sections if section.scale.ratio is not None]
    parts = [
        "# The frontier: accuracy against bytes",
        ABOUT,
        f"`fedpara report {of} --out {to}` wrote this page; do not edit it.\nThe figures come from "
        f"`fedpara report {of} --format svg --out {Path(to).parent / 'assets'}`.\n"
        "Each point and each name in them is a link to its run folder, which works in a checkout.",
        *(section_text(section) for section in sections if section.scale.ratio is None),
        *([ABOUT_FEDMUD] if fedmud else []),
        *(section_text(section) for section in fedmud),
    ]
    return "\n\n".join(parts) + "\n"


def draw(section: Section, path: Path) -> Path:
    return frontier_figure(section.points, path, section.title, section.unit, section.target)
