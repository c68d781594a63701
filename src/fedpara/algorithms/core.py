"""An algorithm is a value: what differs between methods, as functions of State.

    round t, cohort S of N clients, server state x:
        down = broadcast(server)
        each i in S:  y = x
            K times:  g = clip_by_norm(gradient of the loss at y)
                      y = sgd_step(y, correct(g, y, x, down, client_i))
            up_i, client_i = finish(x, y, down, client_i, K, eta)
        x, server = aggregate(x, server, [Update(y_i, up_i, n_i) for i in S], N)

Every method here needs only the mean of the updates, so its `aggregate` is `FromMean(step)`:

        mean = sum_i w_i (y_i, up_i) / sum_i w_i;   x, server = step(x, server, mean, N)

and the engines add the updates up as they come in, so that a cohort of 100 does not need 100 models.

Clipping comes before the correction, so that SCAFFOLD's control variates average what the clients step along.
The states hold the shared, trainable parameters only: private ones and buffers never come here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedpara.errors import ConfigError, StateError, among, expect_kind
from fedpara.state import State, WeightedSum, add, zeros_like

Variables = dict[str, State]
Marked = TypeVar("Marked", bound=Callable[..., Any])

Rule = tuple[str, Callable[[Any], bool]]
LARGEST = torch.finfo(torch.float32).max
POSITIVE: Rule = ("a number above 0", lambda value: value > 0)
NOT_NEGATIVE: Rule = ("a number of 0 or more", lambda value: value >= 0)
BELOW_ONE: Rule = ("a number of 0 or more and below 1", lambda value: 0 <= value < 1)
AT_MOST_ONE: Rule = ("a number above 0 and at most 1", lambda value: 0 < value <= 1)
COUNT: Rule = (
    "a whole number of 1 or more, below 2^31",
    lambda value: 1 <= value < 1 << 31 and isinstance(value, Integral),
)
SEED: Rule = (
    "a whole number, 0 to 2^63 - 1",
    lambda value: 0 <= value < 1 << 63 and isinstance(value, Integral),
)


def check(rule: Rule, **values: Any) -> None:
    """ConfigError for the first value that is not a finite number within the rule."""
    expected, holds = rule
    for name, value in values.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not -math.inf < value < math.inf or not holds(value):
            raise ConfigError(f"{name} is {value!r}: expected {expected}.")
        if abs(value) > LARGEST:
            raise ConfigError(
                f"{name} is {value!r}: expected a number that float32 holds, up to {LARGEST:.3g}."
            )


@dataclass(frozen=True)
class Local:
    """What one client does in one round. `epochs`, or `steps` in its place."""

    lr: float = 0.1
    lr_decay: float = 1.0  # a round
    epochs: int | None = 1
    steps: int | None = None
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None  # global norm of the gradient
    jacobian: float = 0.0  # lambda of the Jacobian correction (appendix B)
    jacobian_norm: Literal["plain", "squared"] = "plain"

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs == Local.epochs:
            object.__setattr__(self, "epochs", None)
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"epochs is {self.epochs!r} and steps is {self.steps!r}: expected one of the two, "
                "and None for the other."
            )
        check(POSITIVE, lr=self.lr)
        check(AT_MOST_ONE, lr_decay=self.lr_decay)
        check(COUNT, batch_size=self.batch_size)
        check(COUNT, **({"epochs": self.epochs} if self.steps is None else {"steps": self.steps}))
        check(BELOW_ONE, momentum=self.momentum)
        check(NOT_NEGATIVE, weight_decay=self.weight_decay, jacobian=self.jacobian)
        if self.clip is not None:
            check(POSITIVE, clip=self.clip)
        if self.jacobian_norm not in ("plain", "squared"):
            raise ConfigError(f"jacobian_norm is {self.jacobian_norm!r}: expected 'plain' or 'squared'.")

    def lr_at(self, round: int) -> float:
        """eta_t = lr * lr_decay^(t - 1); rounds count from 1."""
        check(COUNT, round=round)
        return float(self.lr * self.lr_decay ** (round - 1))

    def steps_for(self, examples: int) -> int:
        """K = ceil(n / B) * epochs, or `steps`; 0 for a client without examples, who has nothing to step on."""
        if examples < 1:
            return 0
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # the invariant of __post_init__, for the type checker
        return -(-examples // self.batch_size) * self.epochs


Weighting = Literal["examples", "uniform"]


@dataclass(frozen=True)
class Update:
    """What the server has of one client after the wire."""

    y: State
    extra: Variables
    examples: int
    weight: float | None = None
    """w_i, where a run caps the number of examples (max_share) or weights all clients alike"""


@dataclass(frozen=True)
class Mean:
    """The mean over a round's updates: sum_i w_i (y_i, up_i) / sum_i w_i."""

    y: State
    extra: Variables
    count: int  # |S|


class MeanOfUpdates:
    """`Mean`, one update at a time. `total` is the sum of the weights that are expected."""

    def __init__(self, x: State, total: float) -> None:
        self._x, self._total, self._count = x, total, 0
        self._y = WeightedSum(total)
        self._extra: dict[str, WeightedSum] = {}

    def add(self, update: Update, weight: float) -> None:
        if update.y.keys() != self._x.keys():
            odd = ", ".join(sorted(update.y.keys() ^ self._x.keys())[:5])
            raise StateError(f"a client's state and the server's differ in names: {odd}. Expected the same.")
        # In the type of x, which a quantized uplink may have narrowed.
        self._y.add({name: update.y[name].to(x.dtype) for name, x in self._x.items()}, weight)
        for group, state in update.extra.items():
            self._extra.setdefault(group, WeightedSum(self._total)).add(state, weight)
        self._count += 1

    def result(self) -> Mean:
        extra = {group: sum_.mean() for group, sum_ in self._extra.items()}
        return Mean(self._y.mean(), extra, self._count)


@dataclass(frozen=True)
class FromMean:
    """An `aggregate` that needs only the mean of the updates: x, server = step(x, server, mean, N).

    `weights` says which mean: "examples" weights a client by its number of examples, "uniform" gives all the same.
    """

    step: Callable[[State, Variables, Mean, int], tuple[State, Variables]]
    weights: Weighting = "examples"

    def weight(self, update: Update) -> float:
        """w_i of the mean that this method takes."""
        if self.weights == "uniform":
            return 1.0
        return float(update.examples) if update.weight is None else update.weight

    def __call__(
        self, x: State, server: Variables, updates: Sequence[Update], clients: int
    ) -> tuple[State, Variables]:
        if not updates:
            raise StateError("mean of 0 states: expected at least one update.")
        mean = MeanOfUpdates(x, sum(map(self.weight, updates)))
        for update in updates:
            mean.add(update, self.weight(update))
        return self.step(x, server, mean.result(), clients)


@dataclass(frozen=True)
class Algorithm:
    """A method as a value. A state is a dict of tensors by name, Variables are states by name.

    x is the server's model, y a client's. To write a new one, take `replace(fedavg(...), ...)` with the functions that
    differ; examples/02_own_algorithm.py does so.
    """

    name: str
    local: Local
    server_init: Callable[[State], Variables]
    """x -> the server's variables"""
    broadcast: Callable[[Variables], Variables]
    """server's variables -> the groups that travel down with x"""
    client_init: Callable[[State], Variables]
    """x -> a client's own variables, at its first round"""
    correct: Callable[[State, State, State, Variables, Variables], State]
    """(gradient, y, x, down, client) -> gradient, each step: tensor operations only, under vmap and compile"""
    finish: Callable[[State, State, Variables, Variables, int, float], tuple[Variables, Variables]]
    """(x, y, down, client, K, eta) -> the groups to upload, the client's new variables"""
    aggregate: Callable[[State, Variables, Sequence[Update], int], tuple[State, Variables]]
    """(x, server's variables, updates, N) -> the new x, the server's new variables; `FromMean` holds one update only"""

    def __post_init__(self) -> None:
        expect_kind("name", self.name, str, ConfigError)
        expect_kind("local", self.local, Local, ConfigError)

    @property
    def on_any_device(self) -> bool:
        """Whether `finish` and `aggregate` are marked so: else they are given tensors on the host."""
        return _is_marked(self.finish) and _is_marked(self.aggregate)


def on_any_device(function: Marked) -> Marked:
    """The mark of a `finish` or an `aggregate` that makes no tensors of its own but like those it is given.

    What clients trained on a GPU then stays there until it is aggregated. A function that wraps a marked one is not
    marked by that; a partial of one is.
    """
    plain: Any = getattr(function, "__func__", function)  # of a method
    plain.on_any_device = plain  # itself, for functools.wraps copies attributes
    return function


def _is_marked(function: Callable[..., Any]) -> bool:
    if isinstance(function, FromMean):
        return _is_marked(function.step)
    while isinstance(function, partial) and not hasattr(function, "on_any_device"):
        function = function.func
    plain = getattr(function, "__func__", function)
    return getattr(plain, "on_any_device", None) is plain


def local_of(local: Local | None, given: Mapping[str, Any]) -> Local:
    """`local` (or the defaults) with the given fields replaced."""
    if local is not None:
        expect_kind("local", local, Local, ConfigError)
    known = [field.name for field in fields(Local)]
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}: {among(name, known)}")
    return replace(local or Local(), **given)


def group(groups: Variables, name: str) -> State:
    """A group by name. A message carries no trace of a group without tensors: absent is empty."""
    return groups.get(name, {})


def expect_groups(algorithm: str, function: str, made: object) -> Variables:
    """ConfigError where a function of one's own returned something else than states by name."""
    said = f"algorithm {algorithm!r}: {function} returned"
    if not isinstance(made, dict):
        raise ConfigError(
            f"{said} {type(made).__name__}: expected groups, a dict of tensors by name for each."
        )
    for group, state in made.items():
        if not (isinstance(state, dict) and all(isinstance(tensor, Tensor) for tensor in state.values())):
            raise ConfigError(f"{said} {type(state).__name__} for {group!r}: expected tensors by name.")
    return made


def expect_like(algorithm: str, function: str, made: object, x: State) -> None:
    """ConfigError where a function of one's own returned something else than x's names, shapes and types."""
    said = f"algorithm {algorithm!r}: {function} returned"
    if not isinstance(made, dict):
        raise ConfigError(f"{said} {type(made).__name__}: expected a dict of tensors by the model's names.")
    for name in {**x, **made}:
        got, expected = (_kind(state.get(name)) for state in (made, x))
        if got != expected:
            raise ConfigError(f"{said} {got} for {name!r}: expected {expected}.")


def _kind(tensor: object) -> str:
    if isinstance(tensor, Tensor):
        return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return "nothing" if tensor is None else type(tensor).__name__


def sgd_step(
    y: State, gradient: State, velocity: State | None, lr: float | Tensor, local: Local
) -> tuple[State, State]:
    """g += wd y;  v = m v + g;  y -= lr v, as torch.optim.SGD. No velocity (None or empty) is v = 0.

    Without momentum the velocity stays empty.
    """
    v = gradient
    if local.weight_decay:
        v = add(v, y, local.weight_decay)
    if local.momentum:
        previous = velocity or zeros_like(v)
        v = {name: local.momentum * previous[name] + g for name, g in v.items()}
    kept = v if local.momentum else {}
    if isinstance(lr, Tensor):
        return {name: torch.addcmul(tensor, v[name], lr, value=-1) for name, tensor in y.items()}, kept
    return add(y, v, -lr), kept


def clip_by_norm(gradient: State, max_norm: float) -> State:
    """g min(1, max_norm / (||g|| + 1e-6)) over all tensors at once, as torch.nn.utils.clip_grad_norm_."""
    if not gradient:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradient.values()])
    factor = (max_norm / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in gradient.items()}
