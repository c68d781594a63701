"""Settings: how a run is carried out. The task, the data and the algorithm say what is learned."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from fedpara.algorithms.core import Weighting
from fedpara.algorithms.local import AT_MOST_ONE, BELOW_ONE, COUNT, POSITIVE, SEED, check
from fedpara.choices import ENGINES, PRODUCTS
from fedpara.engines.participation.cohorts import Sampler, check_sampler
from fedpara.engines.participation.devices import Devices
from fedpara.errors import ConfigError
from fedpara.wire import Link

Share = Literal["all", "none", "fedper"]
Precision = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True)
class Settings:
    """`simulate` documents each field."""

    rounds: int
    cohort: int
    seed: int = 0
    link: Link = field(default_factory=Link)
    share: Share = "all"
    engine: str = "auto"
    precision: Precision | None = None
    device: str | None = None
    evaluate_every: int = 1
    personal: bool | None = None
    max_norm: float | None = None
    weights: Weighting = "examples"
    max_share: float | None = None
    target: float | None = None
    sampler: str | Sampler = "uniform"
    lost: float = 0.0
    devices: Devices | None = None
    patience: int | None = None
    products: str = "mean"
    aggregation_error: bool = False
    gammas: str | Sequence[float] | None = None

    def __post_init__(self) -> None:
        check(COUNT, rounds=self.rounds, cohort=self.cohort, evaluate_every=self.evaluate_every)
        check(COUNT, patience=self.patience)
        check(BELOW_ONE, lost=self.lost)
        check_sampler(self.sampler)
        check(SEED, seed=self.seed)
        for rule, name in ((POSITIVE, "max_norm"), (AT_MOST_ONE, "max_share")):
            if getattr(self, name) is not None:
                check(rule, **{name: getattr(self, name)})
        for name, known in (
            ("share", get_args(Share)),
            ("weights", get_args(Weighting)),
            ("engine", ENGINES),
            ("products", PRODUCTS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(known)}.")
        if (gammas := read_gammas(self.gammas)) is not None:
            object.__setattr__(self, "gammas", ", ".join(f"{gamma:g}" for gamma in gammas))
        check_device(self.device)
        check_precision(self.precision, self.engine, self.device)


def read_gammas(given: str | Sequence[float] | None) -> tuple[float, ...] | None:
    """The numbers in a list such as "0.1, 0.3, 0.5"."""
    if given is None:
        return None
    try:
        gammas = tuple(float(gamma) for gamma in (given.split(",") if isinstance(given, str) else given))
    except ValueError:
        gammas = ()
    if not gammas or not all(0 <= gamma <= 1 for gamma in gammas):
        raise ConfigError(f"gammas is {given!r}: expected numbers from 0 to 1, such as '0.1, 0.3, 0.5'.")
    return gammas


def check_device(device: str | None) -> None:
    """ConfigError unless this machine has the device."""
    if device in (None, "cpu"):
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu", *["cuda"] * (count > 0), *(f"cuda:{i}" for i in range(count))]
    if device not in there:
        missing = " torch finds no GPU here." if not count else ""
        raise ConfigError(f"device is {device!r}: expected one of {', '.join(there)}.{missing}")


def check_precision(precision: str | None, engine: str, device: str | None) -> None:
    if precision in (None, "float32"):
        return
    if precision not in get_args(Precision):
        raise ConfigError(f"precision is {precision!r}: expected one of {', '.join(get_args(Precision))}.")
    if engine == "flower" or device == "cpu" or not torch.cuda.is_available():
        raise ConfigError(
            f"precision {precision!r} needs the batched or the sequential engine on a GPU: leave it out for float32."
        )
