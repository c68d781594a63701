"""Tables and figures without training: ranks, parameters, and the time of one round."""

from collections.abc import Callable

from fedpara.experiments.paper.recipe import experiment
from fedpara.experiments.paper.sizes import parameters, random_ranks, traffic
from fedpara.experiments.paper.study import Cell, Measure, Study
from fedpara.parameterization import FedPara, LowRank
from fedpara.parameterization.schemes import Scheme, write
from fedpara.wire import PAPER_MEGA, communication_seconds

SPEEDS = (2, 10, 50)
COMPUTE = {"original": 1.64, "FedPara": 2.34}
"""Seconds of local training per round, measured by the paper on its GPU."""
PRINTED = {"model": "vgg16"}
"""VGG16 with biases, whose sizes are nearest to the printed ones. The trained networks have no biases."""


def _given(value: float) -> Measure:
    return lambda: value


RANK_HISTOGRAM = Study(
    "rank-histogram",
    "Rank of random products",
    "appendix A.2",
    (
        Cell("at full rank", "1,000 products", 100.0, (), lambda: random_ranks().get(100, 0) / 10, "%0"),
        Cell(
            "entries of W over entries of the factors",
            "1,000 products",
            2.5,
            (),
            _given(100 * 100 / (4 * 100 * 10)),
            "x1",
        ),
    ),
    notes=("W is 100 x 100, the factors are 100 x 10 and standard normal. The rank is computed in float64.",),
    figure="histogram",
)


def _layer(shape: tuple[int, ...], scheme: Scheme, copies: int = 1) -> tuple[Measure, Measure]:
    """(parameters, maximal rank) of the sum of `copies` such weights."""
    form = write(scheme, shape)
    return _given(copies * form.parameters), _given(min(copies * form.max_rank, shape[0]))


def _table_sizes() -> tuple[Cell, ...]:
    fc, conv = (256, 256), (256, 256, 3, 3)
    rows: list[tuple[str, float, float, tuple[Measure, Measure]]] = [
        ("FC, original", 66e3, 256, (_given(256 * 256), _given(256))),
        ("FC, low-rank", 16e3, 32, _layer(fc, LowRank(rank=32))),
        ("FC, FedPara", 16e3, 256, _layer(fc, FedPara(rank=16))),
        ("convolution, original", 590e3, 256, (_given(256 * 256 * 9), _given(256))),
        ("convolution, low-rank", 21e3, 32, _layer(conv, LowRank(rank=16), copies=2)),
        ("convolution, FedPara (Prop. 1)", 82e3, 256, _layer(conv, FedPara(rank=16, conv="reshape"))),
        ("convolution, FedPara (Prop. 3)", 21e3, 256, _layer(conv, FedPara(rank=16))),
    ]
    return tuple(
        cell
        for row, size, rank, (count, bound) in rows
        for cell in (
            Cell(row, "parameters", size, (), count, "K"),
            Cell(row, "maximal rank", rank, (), bound, "n"),
        )
    )


TABLE_SIZES = Study(
    "table-sizes",
    "Parameters and maximal rank of one layer",
    "Table 1",
    _table_sizes(),
    notes=(
        "m = n = O = I = 256, 3 x 3 kernels, R = 16. The low-rank kernel is the sum of two Tucker terms of rank R.",
    ),
    figure="none",
)

_PARAMETERS = {
    "original": (15.25, 15.30),
    **dict(zip((f"{g / 10:g}" for g in range(1, 10)), (
        *((1.55, 1.59), (2.33, 2.38), (3.31, 3.36), (4.45, 4.50), (5.79, 5.84)),
        *((7.33, 7.38), (9.01, 9.05), (10.90, 10.94), (12.92, 12.96)),
    ), strict=True)),
}  # fmt: skip


def _count(setting: str, row: str) -> Callable[[], float]:
    if row == "original":
        return lambda: parameters(experiment(setting, "vgg16", "original", **PRINTED))
    return lambda: parameters(experiment(setting, "vgg16", gamma=float(row), **PRINTED))


GAMMA_SIZES = Study(
    "gamma-sizes",
    "VGG16's parameters by gamma",
    "appendix C.2",
    tuple(
        Cell(
            "original" if row == "original" else f"γ {row}",
            column,
            1e6 * printed,
            (),
            _count(setting, row),
            "M",
        )
        for row, both in _PARAMETERS.items()
        for column, setting, printed in zip(
            ("10 classes", "100 classes"), ("CIFAR-10 IID", "CIFAR-100 IID"), both, strict=True
        )
    ),
    figure="none",
)

_ROUND = {
    ("original", 2): (470.2, 471.84),
    ("FedPara", 2): (47.2, 49.54),
    ("original", 10): (94.04, 94.68),
    ("FedPara", 10): (9.44, 11.78),
    ("original", 50): (18.61, 20.25),
    ("FedPara", 50): (1.88, 4.22),
}
_FASTER = {2: 9.52, 10: 8.04, 50: 4.80}


def _seconds(model: str, mbps: int) -> float:
    chosen = {"scheme": "original"} if model == "original" else {"gamma": 0.1}
    each = traffic(experiment("CIFAR-10 IID", "vgg16", **chosen, **PRINTED))
    return communication_seconds(each.up + each.down, mbps, PAPER_MEGA)


def _round_time() -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for (model, mbps), (sending, whole) in _ROUND.items():
        row = f"{mbps} Mbps, {model}"
        compute = COMPUTE[model]
        cells += [
            Cell(row, "communication", sending, (), lambda m=model, s=mbps: _seconds(m, s), "s"),
            Cell(
                row,
                "with the paper's computing",
                whole,
                (),
                lambda m=model, s=mbps, c=compute: c + _seconds(m, s),
                "s",
            ),
        ]
        if model == "FedPara":
            cells.append(Cell(row, "times faster", _FASTER[mbps], (), lambda s=mbps: _faster(s), "x2"))
    return tuple(cells)


def _faster(mbps: int) -> float:
    original, fedpara = (COMPUTE[m] + _seconds(m, mbps) for m in COMPUTE)
    return original / fedpara


ROUND_TIME = Study(
    "round-time",
    "Time of one round",
    "appendix D.1",
    _round_time(),
    notes=(
        "Communication is the time of one client's encoded messages, both ways, with the paper's megabit of 2^20 bits. "
        "The paper's 470.2 and 94.04 s do not agree with its 18.61 s at 50 Mbps, nor does 94.04 s with its total.",
        "Computing time is the paper's: 1.64 s (original) and 2.34 s (FedPara).",
    ),
    figure="none",
)

STUDIES = (RANK_HISTOGRAM, TABLE_SIZES, GAMMA_SIZES, ROUND_TIME)
