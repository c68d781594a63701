"""Settings: how a run is carried out. The task, the data and the algorithm say what is learned."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from fedpara.algorithms.core import Weighting
from fedpara.algorithms.local import AT_MOST_ONE, BELOW_ONE, COUNT, POSITIVE, SEED, check
from fedpara.choices import ENGINES
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
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(known)}.")
        check_precision(self.precision, self.engine)


def check_precision(precision: str | None, engine: str) -> None:
    if precision in (None, "float32"):
        return
    if precision not in get_args(Precision):
        raise ConfigError(f"precision is {precision!r}: expected one of {', '.join(get_args(Precision))}.")
    if engine not in ("auto", "batched") or not torch.cuda.is_available():
        raise ConfigError(
            f"precision {precision!r} needs the batched engine on a GPU: leave it out for float32."
        )
