"""elementwise: call a `finish` that treats every number alike with a whole state as one tensor.

A hundred small tensors then cost as much as one. The results are neighbours in memory, as messages and files need them.
`on_blocks` gives the function to engines whose states are joined already.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from fedpara.algorithms.core import Variables, no_variables
from fedpara.layout import by_type, cut, flat
from fedpara.state import State, same_names

Finish = Callable[..., tuple[Variables, Variables]]


def elementwise(finish: Finish) -> Finish:
    """`finish`, called once per type of tensor, with each state's tensors of that type joined to one.

    A variable whose names differ from x's, such as one that a custom algorithm added, is passed on unchanged.
    """

    @wraps(finish)
    def whole(
        x: State, y: State, down: Variables, client: Variables, steps: int, eta: float, **hyper: float
    ) -> tuple[Variables, Variables]:
        if not x:
            return finish(x, y, down, client, steps, eta, **hyper)
        same_names(x, y)
        sent: Variables = {}
        own: Variables = {}
        for names in by_type(x):
            models = [{"": flat(state, names)} for state in (x, y)]
            given = [
                {
                    key: {"": flat(state, names)} if state.keys() == x.keys() else state
                    for key, state in variables.items()
                }
                for variables in (down, client)
            ]
            for found, into in zip(finish(*models, *given, steps, eta, **hyper), (sent, own), strict=True):
                for key, state in found.items():
                    into.setdefault(key, {}).update(cut(state[""], x, names))
        return _ordered(sent, x), _ordered(own, x)

    marked: Any = whole
    marked.on_blocks = (
        whole,
        finish,
    )  # not `finish` alone: functools.wraps copies attributes to other functions
    return whole


def on_blocks(finish: Finish) -> Finish | None:
    """`finish` for states of flat tensors, one per type. None if it may not treat every number alike."""
    if finish is no_variables:
        return finish
    if isinstance(finish, partial):
        inner = on_blocks(finish.func)
        return None if inner is None else partial(inner, *finish.args, **finish.keywords)
    whole, plain = getattr(finish, "on_blocks", (None, None))
    return plain if whole is finish else None


def _ordered(variables: Variables, x: State) -> Variables:
    return {key: {name: state[name] for name in x} for key, state in variables.items()}
