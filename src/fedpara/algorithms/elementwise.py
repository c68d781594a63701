"""elementwise: a `finish` that treats every number alike is given all of a state as one tensor.

A hundred small tensors then cost what one does, and what comes out lies side by side, as messages and files want it.
"""

from collections.abc import Callable
from functools import wraps

from fedpara.algorithms.core import Variables
from fedpara.layout import by_type, cut, flat
from fedpara.state import State, same_names

Finish = Callable[..., tuple[Variables, Variables]]


def elementwise(finish: Finish) -> Finish:
    """`finish`, called once for each type of tensor with the states of that type as one tensor each.

    A group that is not like x, which someone may have added, is passed on as it is.
    """

    @wraps(finish)
    def whole(
        x: State, y: State, down: Variables, client: Variables, steps: int, eta: float, **hyper: float
    ) -> tuple[Variables, Variables]:
        if not x:
            return finish(x, y, down, client, steps, eta, **hyper)
        same_names(x, y)
        sent: Variables = {}
        kept: Variables = {}
        for names in by_type(x):
            one = [{"": flat(state, names)} for state in (x, y)]
            groups = [
                {
                    g: {"": flat(state, names)} if state.keys() == x.keys() else state
                    for g, state in some.items()
                }
                for some in (down, client)
            ]
            for found, into in zip(finish(*one, *groups, steps, eta, **hyper), (sent, kept), strict=True):
                for group, state in found.items():
                    into.setdefault(group, {}).update(cut(state[""], x, names))
        return _ordered(sent, x), _ordered(kept, x)

    return whole


def _ordered(groups: Variables, x: State) -> Variables:
    return {group: {name: state[name] for name in x} for group, state in groups.items()}
