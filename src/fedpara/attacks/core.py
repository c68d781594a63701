"""Attack: what the hostile clients of a simulated run do.

    poison    changes a hostile client's examples before it trains
    send      changes what it sends; it knows the model that was broadcast and its own honest update
    collude   knows every honest update of the round, which no real client does: simulation only

A hostile client follows the protocol in everything else: its message has the right names, shapes and types.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedpara.algorithms import Algorithm, Visit
from fedpara.algorithms.core import custom, expect_like, on_any_device
from fedpara.data import Examples
from fedpara.errors import ConfigError
from fedpara.parameterization import Form
from fedpara.state import State

Forms = Mapping[str, Form]


@dataclass(frozen=True)
class Attack:
    """An attack. Attacks are equal if the same call made them, such as `backdoor(target=3)`."""

    name: str
    send: Callable[[State, State, Visit, Forms], State] | None = None
    """(x, y, visit, forms) -> what the client sends in place of its honest y, on the device of y"""
    poison: Callable[[Examples, np.random.Generator], Examples] | None = None
    """(the client's examples, generator) -> as many examples of the same kind"""
    collude: Callable[[Sequence[State], State, int, int], State] | None = None
    """(honest y of the round, x, hostile clients, clients of the round) -> what every hostile client sends"""
    triggered: Callable[[Examples], Examples] | None = None
    """test examples -> those with a trigger, all with the attacker's target: their accuracy is the attack's success"""

    def __post_init__(self) -> None:
        if not (self.send or self.poison or self.collude):
            raise ConfigError(f"Attack {self.name!r} does nothing: give it send, poison or collude.")

    def on(self, algorithm: Algorithm, hostile: frozenset[int], forms: Forms) -> Algorithm:
        """The algorithm with this attack on what the hostile clients send."""
        if self.send is None:
            return algorithm
        attack = partial(_checked, self.name, self.send)
        given = {"honest": algorithm.send, "attack": attack, "hostile": hostile, "forms": forms}
        # `on_any_device` looks at the outer function only, so a custom `send` needs the unmarked one.
        outer: Any = _sent_anywhere if algorithm.on_any_device else _sent
        return replace(algorithm, send=partial(outer, **given))


def _checked(
    name: str,
    send: Callable[[State, State, Visit, Forms], State],
    x: State,
    y: State,
    visit: Visit,
    forms: Forms,
) -> State:
    what = f"attack {name!r}: send"
    with custom(what, "send(x, y, visit, forms)"):
        sent = send(x, y, visit, forms)
    expect_like(what, sent, y)
    return sent


def _sent(
    x: State,
    y: State,
    visit: Visit,
    *,
    honest: Callable[[State, State, Visit], State],
    attack: Callable[[State, State, Visit, Forms], State],
    hostile: frozenset[int],
    forms: Forms,
) -> State:
    y = honest(x, y, visit)
    return attack(x, y, visit, forms) if visit.client in hostile else y


@on_any_device
def _sent_anywhere(x: State, y: State, visit: Visit, **given: Any) -> State:
    return _sent(x, y, visit, **given)
