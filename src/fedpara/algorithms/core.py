"""An algorithm is a frozen dataclass of functions of states.

    round t, cohort S of N clients, server state x:
        down = broadcast(server)
        each i in S:  y = x
            K times:  g = clip_by_norm(gradient at y of the loss, plus the mean of `distill` if it is set)
                      y = optimizer step with correct(g, y, x, down, client_i)
            up_i, client_i = finish(x, y, down, client_i, K, eta);   y_i = send(x, y, visit)
            with `personal`, the same steps again from v_i, with personal.correct; v_i stays with the client
        x, server = aggregate(x, server, [Update(y_i, up_i, n_i) for i in S], N)

Every algorithm here needs only the mean of the updates, so its `aggregate` is `FromMean(step)`:

        mean = sum_i w_i (y_i, up_i) / sum_i w_i;   x, server = step(x, server, mean, N)

The engines then sum the updates as they arrive: a cohort of 100 does not need 100 models in memory.

Clipping comes before the correction, so that SCAFFOLD's control variates average the clipped gradients.
The states hold the shared, trainable parameters only, without private parameters and buffers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedpara.algorithms.local import Local
from fedpara.errors import ConfigError, FedParaError, in_a_line
from fedpara.state import State, WeightedSum, same_names

Variables = dict[str, State]
"""What an algorithm keeps or sends beside the model, such as SCAFFOLD's {"control": c}. Each variable is a state."""
Marked = TypeVar("Marked", bound=Callable[..., Any])

Distill = Callable[[Any, Any, Any], Any]
"""(output of y, targets, output of the model that the client received) -> values per example, as a loss returns them"""
Weighting = Literal["examples", "uniform"]


@dataclass(frozen=True)
class Update:
    """One client's message, as the server decoded it."""

    y: State
    extra: Variables
    examples: int
    weight: float | None = None
    """w_i, if a run caps a client's share (max_share) or weights all clients equally; None means `examples`"""
    client: int = -1
    loss: float = math.nan
    """the client's training loss: the mean over its local steps"""


@dataclass(frozen=True)
class Mean:
    """The mean over a round's updates: sum_i w_i (y_i, up_i) / sum_i w_i."""

    y: State
    extra: Variables
    count: int  # |S|


class MeanOfUpdates:
    """Computes `Mean`, one update at a time. `total` is the sum of the expected weights."""

    def __init__(self, x: State, total: float) -> None:
        self._x, self._total, self._count = x, total, 0
        self._y = WeightedSum(total)
        self._extra: dict[str, WeightedSum] = {}

    def add(self, update: Update, weight: float) -> None:
        same_names(self._x, update.y)
        # In the type of x: a quantized uplink may have narrowed y.
        self._y.add({name: update.y[name].to(x.dtype) for name, x in self._x.items()}, weight)
        for name, state in update.extra.items():
            self._extra.setdefault(name, WeightedSum(self._total)).add(state, weight)
        self._count += 1

    def result(self) -> Mean:
        extra = {name: total.mean() for name, total in self._extra.items()}
        return Mean(self._y.mean(), extra, self._count)


@dataclass(frozen=True)
class FromMean:
    """An `aggregate` that needs only the mean of the updates: x, server = step(x, server, mean, N).

    `weights` is "examples" (a client counts by its number of examples) or "uniform" (all clients count the same).
    """

    step: Callable[[State, Variables, Mean, int], tuple[State, Variables]]
    weights: Weighting = "examples"

    def weight(self, update: Update) -> float:
        """w_i of the mean."""
        if self.weights == "uniform":
            return 1.0
        return float(update.examples) if update.weight is None else update.weight

    def __call__(
        self, x: State, server: Variables, updates: Sequence[Update], clients: int
    ) -> tuple[State, Variables]:
        mean = MeanOfUpdates(x, sum(map(self.weight, updates)))
        for update in updates:
            mean.add(update, self.weight(update))
        return self.step(x, server, mean.result(), clients)


def on_any_device(function: Marked) -> Marked:
    """Mark a `send`, a `finish` or an `aggregate` that allocates only on its inputs' device.

    Models that were trained on a GPU then stay there until they are aggregated. A partial of a marked function is
    marked; a function that wraps one is not.
    """
    plain: Any = getattr(function, "__func__", function)  # the function of a method
    plain.on_any_device = plain  # not True: functools.wraps copies attributes to other functions
    return function


@dataclass(frozen=True)
class Visit:
    """One client's part of one round, for `send`."""

    client: int
    round: int
    steps: int  # K
    eta: float  # the mean learning rate of the steps
    seed: int  # of this client and round

    def generator(self) -> torch.Generator:
        """A generator on the host, the same for this client and round in every engine."""
        return torch.Generator().manual_seed(self.seed)


@on_any_device
def as_trained(x: State, y: State, visit: Visit) -> State:
    """The default `send`: y itself."""
    return y


@on_any_device
def no_variables(
    x: State, y: State, down: Variables, client: Variables, steps: int, eta: float
) -> tuple[Variables, Variables]:
    return {}, {}


@dataclass(frozen=True)
class Personal:
    """A second local objective: in each round a client also trains a model v, which never leaves it.

        v = x in the client's first round
        K times:  g = clip_by_norm(gradient of the loss at v);  v = optimizer step with correct(g, v, x, down, client)

    All parameters of v train, and v has its own buffers. `correct` gets the shared part of the gradient and of v. Both
    trainings of a round draw from the same random streams: with the same `local` they see the same batches.
    """

    correct: Callable[[State, State, State, Variables, Variables], State]
    """(gradient, v, x, down, client) -> gradient, as `Algorithm.correct`; `client` is as before the round"""
    local: Local | None = None
    """the steps on v; by default the algorithm's `local`"""


@dataclass(frozen=True)
class Algorithm:
    """A federated learning algorithm. A state is a dict of tensors by name; Variables are a dict of states by name.

    x is the server's model, y a client's. To write a custom algorithm, call `replace(fedavg(...), ...)` with the
    functions that differ, as examples/own_algorithm.py does.
    """

    name: str
    local: Local
    server_init: Callable[[State], Variables]
    """x -> the server's variables"""
    broadcast: Callable[[Variables], Variables]
    """server's variables -> the variables that are sent to the clients with x"""
    client_init: Callable[[State], Variables]
    """x -> a client's variables at its first round"""
    correct: Callable[[State, State, State, Variables, Variables], State]
    """(gradient, y, x, down, client) -> gradient, in each step; tensor operations only, for vmap and compile"""
    finish: Callable[[State, State, Variables, Variables, int, float], tuple[Variables, Variables]]
    """(x, y, down, client, K, eta) -> the variables to upload, the client's new variables"""
    aggregate: Callable[[State, Variables, Sequence[Update], int], tuple[State, Variables]]
    """(x, server's variables, updates, N) -> the new x, the server's new variables; `FromMean` saves memory"""
    send: Callable[[State, State, Visit], State] = as_trained
    """(x, y, visit) -> what the client sends in place of y, such as a noisy or a normalised model"""
    personal: Personal | None = None
    """a second model that each client trains and keeps, as in Ditto"""
    distill: Distill | None = None
    """a term of the loss that compares y's output with that of the model that the client received, which is in
    evaluation mode; personal models train without it"""

    @property
    def of_personal(self) -> "Algorithm | None":
        """The algorithm by which a client trains its personal model."""
        if self.personal is None:
            return None
        local = replace(self.personal.local or self.local, rounds=self.local.rounds)
        return replace(self, local=local, correct=self.personal.correct, personal=None, distill=None)

    @property
    def on_any_device(self) -> bool:
        """Whether its functions are marked `on_any_device`. Otherwise they get tensors on the host."""
        return _is_marked(self.send) and _is_marked(self.finish) and _is_marked(self.aggregate)


def _is_marked(function: Callable[..., Any]) -> bool:
    if isinstance(function, FromMean):
        return _is_marked(function.step)
    while isinstance(function, partial) and not hasattr(function, "on_any_device"):
        function = function.func
    plain = getattr(function, "__func__", function)
    return getattr(plain, "on_any_device", None) is plain


def variable(variables: Variables, name: str) -> State:
    """A variable by name. Messages do not carry a variable without tensors, so a missing one is empty."""
    return variables.get(name, {})


def expect_variables(function: str, made: Any) -> Variables:
    """What a custom algorithm's function returned, or ConfigError if it is not a dict of states."""
    if not isinstance(made, dict) or not all(isinstance(state, dict) for state in made.values()):
        got = _kind(made)
    elif wrong := [one for state in made.values() for one in state.values() if not isinstance(one, Tensor)]:
        got = f"a state that holds {type(wrong[0]).__name__}"
    else:
        return made
    raise ConfigError(
        f"{function} returned {got}: expected a dict of states, which hold tensors, such as {{'h': x}}."
    )


def _kind(made: Any) -> str:
    """What a function returned in place of a dict of states."""
    if not isinstance(made, dict):
        return type(made).__name__
    name, state = next((name, state) for name, state in made.items() if not isinstance(state, dict))
    return f"a dict in which {name!r} holds {type(state).__name__}"


def expect_like(function: str, made: Any, x: State) -> None:
    """Raise ConfigError if a custom algorithm's function did not return x's names, shapes and types."""
    given = made if isinstance(made, dict) else {}
    for name in {**x, **given}:
        got, expected = (_described(state.get(name)) for state in (given, x))
        if got != expected:
            raise ConfigError(f"{function} returned {got} for {name!r}: expected {expected}.")


@contextmanager
def custom(function: str, called: str) -> Iterator[None]:
    """Around a call of a custom function: its errors become one ConfigError, which says how the function is called."""
    try:
        yield
    except (FedParaError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = in_a_line(error).rstrip(".")
        raise ConfigError(f"{function} failed: {what}. It is called as {called}.") from error


def expect_same(function: str, made: Variables, before: Variables) -> None:
    """Raise ConfigError unless every variable is there still, with its names and shapes. Types may become wider."""
    for name, state in before.items():
        if state and name not in made:
            raise ConfigError(f"{function} returned no variable {name!r}, which it was given.")
        now = made.get(name, {})
        for key, tensor in state.items():
            if key not in now or now[key].shape != tensor.shape:
                got = _described(now.get(key))
                raise ConfigError(
                    f"{function} returned {got} for {key!r} of variable {name!r}: expected {_described(tensor)}."
                )


def expect_tensor(function: str, made: Any, shape: Sequence[int]) -> Tensor:
    """What a custom function returned, or ConfigError if it is no tensor of this shape."""
    if isinstance(made, Tensor) and tuple(made.shape) == tuple(shape):
        return made
    raise ConfigError(f"{function} returned {_described(made)}: expected a tensor of shape {tuple(shape)}.")


def _described(tensor: object) -> str:
    if isinstance(tensor, Tensor):
        return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return "nothing" if tensor is None else type(tensor).__name__


def clip_by_norm(gradient: State, max_norm: float) -> State:
    """g min(1, max_norm / (||g|| + 1e-6)) over all tensors at once, as torch.nn.utils.clip_grad_norm_."""
    if not gradient:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradient.values()])
    factor = (max_norm / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in gradient.items()}
