"""Calls every function of an algorithm once, on the model as it starts, and looks at what it returns.

`aggregate` is left to its first round: it may keep what it is called with.

A function may change the gradient that it is given, and nothing else: what it gets may be shared with other clients.
"""

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

from torch import Tensor

from fedpara.algorithms import Algorithm, Variables, Visit
from fedpara.algorithms.core import custom, expect_like, expect_same, expect_variables
from fedpara.algorithms.optimizers import Optimizer
from fedpara.engines.session import PERSONAL, PRIVATE
from fedpara.errors import ConfigError
from fedpara.state import State, clone, zeros_like

Problem = tuple[str, Exception | None]
"""A sentence for the user, and the error that it explains."""


def algorithm_problems(a: Algorithm, x: State) -> Iterator[Problem]:
    its = f"algorithm {a.name!r}: "
    if a.local.schedule is not None:
        factor = _called(f"{its}schedule", "at, rounds", a.local.schedule, 0.0, 1)
        if not isinstance(factor, Real):
            advice = "expected a factor of the learning rate, such as 0.5."
            yield f"{its}schedule returned {type(factor).__name__}: {advice}", None
    server = _variables(f"{its}server_init", "x", a.server_init, x)
    down = _variables(f"{its}broadcast", "server", a.broadcast, server)
    first = _variables(f"{its}client_init", "x", a.client_init, x)
    corrections = {"correct": a.correct} | ({"personal.correct": a.personal.correct} if a.personal else {})
    for name, correct in corrections.items():
        takes, given = "gradient, y, x, down, client", (zeros_like(x), x, x, down, first)
        expect_like(its + name, _called(its + name, takes, correct, *given, free=1), x)
    for local in (a.local, a.personal.local if a.personal else None):
        if local is not None and isinstance(local.optimizer, Optimizer):
            _check_optimizer(its, local.optimizer, x)
    sent = _called(f"{its}send", "x, y, visit", a.send, x, x, Visit(0, 1, 1, 1.0, 0))
    expect_like(f"{its}send", sent, x)
    made = _called(f"{its}finish", "x, y, down, client, steps, lr", a.finish, x, x, down, first, 1, 1.0)
    if not (isinstance(made, tuple) and len(made) == 2):
        what = "expected a pair of dicts, what the client sends and its new variables."
        yield f"{its}finish returned {type(made).__name__}: {what}", None
    extra, own = (expect_variables(f"{its}finish", part) for part in made)
    if taken := {PRIVATE, PERSONAL, ""} & {*first, *own, *down, *extra}:
        yield f"algorithm {a.name!r} names a variable {taken.pop()!r}, which is reserved: rename it.", None
    if any(state.keys() != first.get(name, {}).keys() for name, state in own.items()):
        what = "client variables with other names than client_init: expected the same names."
        yield f"{its}finish returns {what}", None
    if lost := next((name for name, state in first.items() if state and name not in own), None):
        what = f"no client variable {lost!r}, which client_init makes: return it, or it starts again in every round."
        yield f"{its}finish returns {what}", None


def _check_optimizer(its: str, optimizer: Optimizer, x: State) -> None:
    """Calls a custom optimizer once. A step may change all that it is given."""
    its = f"{its}optimizer {optimizer.name!r}: "
    slots = _variables(f"{its}init", "y", optimizer.init, x)
    given = (clone(x), zeros_like(x), {name: clone(state) for name, state in slots.items()}, 0.0)
    made = _called(f"{its}step", "y, gradient, slots, lr", optimizer.step, *given, free=4)
    if not (isinstance(made, tuple) and len(made) == 2):
        what = "expected a pair, the new y and the new slots."
        raise ConfigError(f"{its}step returned {type(made).__name__}: {what}")
    expect_like(f"{its}step", made[0], x)
    expect_same(f"{its}step", expect_variables(f"{its}step", made[1]), slots)


def _variables(function: str, takes: str, call: Callable[..., Any], *given: Any) -> Variables:
    return expect_variables(function, _called(function, takes, call, *given))


def _called(function: str, takes: str, call: Callable[..., Any], *given: Any, free: int = 0) -> Any:
    """What the function returned. The first `free` arguments are its own, to change as it likes."""
    before = [_content(one) for one in given[free:]]
    with custom(function, f"{function.rpartition(' ')[2]}({takes})"):
        made = call(*given)
    if before != [_content(one) for one in given[free:]]:
        raise ConfigError(
            f"{function} changes what it was given, which other clients may share. Make new tensors and dicts: "
            "{name: x[name] - y[name] for name in x} in place of x[name] -= y[name]."
        )
    return made


def _content(given: Any) -> Any:
    """The tensors in nested dicts, each with the number of times that it was written to."""
    if isinstance(given, Tensor):
        return id(given), given._version
    return {name: _content(one) for name, one in given.items()} if isinstance(given, dict) else None
