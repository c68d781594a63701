"""Local: what one client does in one round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

from fedpara.algorithms.optimizers import Optimizer, build_optimizer
from fedpara.algorithms.schedules import RateSchedule, constant, cosine, linear, step_decay
from fedpara.errors import ConfigError, among

PerClient = Callable[[int], Mapping[str, Any]] | Mapping[int, Mapping[str, Any]]
"""client -> the settings that differ. A dict may leave clients out."""
Rule = tuple[str, Callable[[Any], bool]]
POSITIVE: Rule = ("a number above 0", lambda value: value > 0)
NOT_NEGATIVE: Rule = ("a number of 0 or more", lambda value: value >= 0)
BELOW_ONE: Rule = ("a number of 0 or more and below 1", lambda value: 0 <= value < 1)
AT_MOST_ONE: Rule = ("a number above 0 and at most 1", lambda value: 0 < value <= 1)
COUNT: Rule = ("a whole number of 1 or more", lambda value: value >= 1 and isinstance(value, Integral))
SEED: Rule = ("a whole number, 0 to 2^63 - 1", lambda value: 0 <= value < 1 << 63)


def check(rule: Rule, **values: Any) -> None:
    """Raise ConfigError for the first value outside the rule. None means that a value is not set."""
    expected, holds = rule
    for name, value in values.items():
        if value is not None and not (isinstance(value, Real) and holds(value)):
            raise ConfigError(f"{name} is {value!r}: expected {expected}.")


PER_CLIENT = ("lr", "epochs", "steps", "batch_size")
"""The fields that may differ between clients."""


@dataclass(frozen=True)
class Local:
    """What one client does in one round. Set either `epochs` or `steps`."""

    lr: float = 0.1
    lr_decay: float = 1.0  # per round
    epochs: int | None = 1
    steps: int | None = None
    batch_size: int = 32
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0
    clip: float | None = None  # global norm of the gradient
    jacobian: float = 0.0  # lambda of the Jacobian correction (appendix B)
    jacobian_norm: Literal["plain", "squared", "network"] = "plain"
    optimizer: str | Optimizer = "sgd"  # sgd, adam, adamw, or a custom Optimizer
    betas: tuple[float, float] = (0.9, 0.999)  # of adam and adamw
    eps: float = 1e-8  # of adam and adamw
    keep_optimizer: bool = (
        False  # keep its slots on the client between rounds; by default each round starts anew
    )
    schedule: RateSchedule | None = None  # multiplies the learning rate: fedpara.cosine(warmup=5)
    per_client: PerClient | None = None  # lr, epochs, steps or batch_size of some clients
    rounds: int | None = field(default=None, repr=False)  # of the run, for `schedule`; simulate sets it

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs == Local.epochs:
            object.__setattr__(self, "epochs", None)
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(f"epochs is {self.epochs} and steps is {self.steps}: expected one of the two.")
        if self.schedule is not None and not callable(self.schedule):
            raise ConfigError(
                f"schedule is {self.schedule!r}: expected a function, such as fp.cosine(warmup=5)."
            )
        made_by: Any = self.schedule
        if made_by in (constant, cosine, linear, step_decay):
            call = f"schedule=fp.{made_by.__name__}(...)"
            raise ConfigError(f"schedule is the function {made_by.__name__} itself: call it, as in {call}.")
        check(POSITIVE, lr=self.lr, clip=self.clip, eps=self.eps)
        check(AT_MOST_ONE, lr_decay=self.lr_decay)
        check(COUNT, batch_size=self.batch_size, epochs=self.epochs, steps=self.steps)
        check(BELOW_ONE, momentum=self.momentum, **{f"betas[{i}]": beta for i, beta in enumerate(self.betas)})
        check(NOT_NEGATIVE, weight_decay=self.weight_decay, jacobian=self.jacobian)
        if self.jacobian_norm not in ("plain", "squared", "network"):
            raise ConfigError(
                f"jacobian_norm is {self.jacobian_norm!r}: expected 'plain', 'squared' or 'network'."
            )
        build_optimizer(self)
        if self.optimizer != "sgd":
            name = getattr(self.optimizer, "name", self.optimizer)
            for field_, value in (("momentum", self.momentum), ("jacobian", self.jacobian)):
                if value:
                    raise ConfigError(f"{field_} is {value} with optimizer {name}: it applies to sgd only.")

    def of(self, client: int) -> "Local":
        """The settings of one client."""
        if self.per_client is None:
            return self
        own = self.per_client
        found: Any = own.get(client, {}) if isinstance(own, Mapping) else own(client)
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"per_client gives {type(found).__name__} for client {client}: expected a dict such as {{'epochs': 2}} "
                "or {}."
            )
        given = dict(found)
        if unknown := given.keys() - set(PER_CLIENT):
            raise ConfigError(
                f"per_client sets {unknown.pop()!r} for client {client}: expected {', '.join(PER_CLIENT)}."
            )
        if given.get("steps") is not None:
            given.setdefault("epochs", None)
        elif given.get("epochs") is not None:
            given.setdefault("steps", None)
        return replace(self, **given, per_client=None)

    def lr_at(self, round: int, step: int = 0, steps: int = 1) -> float:
        """eta = lr * lr_decay^(t - 1) * schedule(t - 1 + k/K, T) in step k of K; rounds t count from 1."""
        eta = float(self.lr * self.lr_decay ** (round - 1))
        if self.schedule is None:
            return eta
        within = step / steps if getattr(self.schedule, "within", False) else 0.0
        return eta * float(self.schedule(round - 1 + within, self.rounds or round))

    def rates(self, round: int, steps: int) -> list[float]:
        """eta of every step of the round."""
        if not getattr(self.schedule, "within", False):
            return [self.lr_at(round)] * steps
        return [self.lr_at(round, step, steps) for step in range(steps)]

    def mean_lr(self, round: int, steps: int) -> float:
        """The mean of `rates`, which algorithms divide by."""
        rates = self.rates(round, steps)
        return rates[0] if len(set(rates)) == 1 else sum(rates) / max(1, steps)

    def steps_for(self, examples: int) -> int:
        """K = ceil(n / B) * epochs, or `steps`; 0 for a client without examples."""
        if examples < 1:
            return 0
        return self.steps or -(-examples // self.batch_size) * (self.epochs or 1)


SETTINGS = tuple(field.name for field in fields(Local) if field.name != "rounds")
"""The fields that a user sets."""


def with_fields(local: Local | None, given: Mapping[str, Any]) -> Local:
    """`local` with the keywords that an algorithm was given. ConfigError for one that is no field of Local."""
    for name in given:
        if name not in SETTINGS:
            raise ConfigError(f"unknown setting {name!r} of the clients' training: {among(name, SETTINGS)}")
    return replace(local or Local(), **given)


def expect_sgd(algorithm: str, local: Local) -> None:
    """ConfigError unless the client's steps are those of SGD, from whose formula the algorithm follows."""
    if local.optimizer != "sgd":
        name = getattr(local.optimizer, "name", local.optimizer)
        raise ConfigError(
            f"{algorithm} with optimizer {name}: expected sgd. Or choose another algorithm, such as fedavg."
        )
