"""Settings: how a run is carried out. The task, the data and the algorithm say what is learned."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from fedpara.algorithms.core import Weighting
from fedpara.algorithms.local import AT_MOST_ONE, BELOW_ONE, COUNT, POSITIVE, SEED, check
from fedpara.attacks import ATTACKS, Attack
from fedpara.choices import ENGINES, PRODUCTS
from fedpara.engines.participation.cohorts import Sampler, check_sampler
from fedpara.engines.participation.devices import Devices
from fedpara.errors import ConfigError, among
from fedpara.privacy import Privacy, read_privacy
from fedpara.references import library_call
from fedpara.robust import DEFENCES, Defence
from fedpara.secure import SecAgg, read_secure
from fedpara.wire import Link

SHARES = ("all", "none", "fedper")
ALL_BUT = "all but "
"""`share="all but head, norm1"` keeps these modules and parameters on the clients."""
Precision = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True)
class Settings:
    """`simulate` documents each field."""

    rounds: int
    cohort: int
    seed: int = 0
    link: Link = field(default_factory=Link)
    share: str = "all"
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
    robust: str | Defence | None = None
    attack: str | Attack | None = None
    hostile: float = 0.0
    rotate: bool = False
    recycle: int = 0
    privacy: str | Privacy | None = None
    epsilon: float | None = None
    delta: float | None = None
    privacy_seed: int | None = None
    secure: str | SecAgg | None = None
    fold_every: int | None = None

    def __post_init__(self) -> None:
        check(COUNT, rounds=self.rounds, cohort=self.cohort, evaluate_every=self.evaluate_every)
        check(COUNT, patience=self.patience, fold_every=self.fold_every, recycle=self.recycle or None)
        check(BELOW_ONE, lost=self.lost)
        check_sampler(self.sampler)
        check(POSITIVE, epsilon=self.epsilon)
        check(BELOW_ONE, delta=self.delta)
        check(SEED, privacy_seed=self.privacy_seed)
        check(SEED, seed=self.seed)
        for rule, name in ((POSITIVE, "max_norm"), (AT_MOST_ONE, "max_share")):
            if getattr(self, name) is not None:
                check(rule, **{name: getattr(self, name)})
        check_share(self.share)
        for name, known in (
            ("weights", get_args(Weighting)),
            ("engine", ENGINES),
            ("products", PRODUCTS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: expected one of {', '.join(known)}.")
        if (gammas := read_gammas(self.gammas)) is not None:
            object.__setattr__(self, "gammas", ", ".join(f"{gamma:g}" for gamma in gammas))
        factories: dict[str, Mapping[str, Callable[..., Any]]] = {"robust": DEFENCES, "attack": ATTACKS}
        for name, library in factories.items():
            if isinstance(text := getattr(self, name), str):
                function, arguments = library_call(text, library, name)
                object.__setattr__(self, name, library[function](**arguments))
        check_hostile(self.attack, self.hostile, self.engine)
        if isinstance(self.secure, str):
            object.__setattr__(self, "secure", read_secure(self.secure))
        if isinstance(self.privacy, str):
            object.__setattr__(self, "privacy", read_privacy(self.privacy))
        for name, kind, such in (
            ("privacy", Privacy, "privacy.User(noise=1.1, clip=0.5)"),
            ("devices", Devices, "Devices(bandwidth=1e6)"),
            ("robust", Defence, "a name such as 'rfa', or robust.Defence(name, weigh=...)"),
            ("attack", Attack, "a name such as 'sign-flip', or attacks.Attack(name, send=...)"),
        ):
            if (given := getattr(self, name)) is not None and not isinstance(given, kind):
                raise ConfigError(f"{name} is {type(given).__name__}: expected {such}.")
        check_device(self.device)
        check_precision(self.precision, self.engine, self.device)


def check_share(share: object) -> None:
    """ConfigError unless `share` is a known name, or lists what stays on the clients."""
    if not isinstance(share, str) or (share not in SHARES and not all_but(share)):
        raise ConfigError(
            f"unknown share {share!r}: {among(str(share), SHARES)} Or name what stays on the clients, such as 'all but "
            "head, norm1'."
        )


def all_but(text: str) -> tuple[str, ...]:
    """The names in "all but head, norm1"; empty for other texts."""
    names = text.removeprefix(ALL_BUT).split(",") if text.startswith(ALL_BUT) else []
    return tuple(filter(None, (name.strip() for name in names)))


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


def check_hostile(attack: object, share: float, engine: str) -> None:
    """ConfigError unless an attack and a share of hostile clients are given together, or neither."""
    if not 0 <= share <= 0.5:
        raise ConfigError(
            f"hostile is {share}: expected a share of the clients of at most 0.5, such as 0.2. No defence can tell a "
            "hostile majority from an honest one."
        )
    if (attack is None) != (share == 0):
        missing = (
            "hostile clients: set hostile, such as 0.2" if share == 0 else "an attack, such as 'sign-flip'"
        )
        raise ConfigError(f"{'attack' if share == 0 else f'hostile {share}'} needs {missing}.")
    if attack is not None and engine == "flower":
        raise ConfigError(
            "an attack is simulated, and Flower's nodes are real clients: use another engine. `robust` works on Flower."
        )


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
