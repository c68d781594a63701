"""Aggregation: the updates that were admitted become the server's next model, on the device where they are.

x, server = algorithm.aggregate(x, server, updates, N), checked, and from there to the host
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedpara.algorithms import Algorithm, Groups, Update
from fedpara.engines.freight import HOST, bring, place_of
from fedpara.errors import ConfigError, in_a_line
from fedpara.state import State


def aggregated(
    algorithm: Algorithm, x: State, server: Groups, updates: Sequence[Update], clients: int
) -> tuple[State, Groups, str]:
    """The new x, the server's new variables, and what is to be said about how they were made, if anything.

    ConfigError in the round that made it, where it is no model like x: the next one, if any, could not send it.
    """
    (fresh, variables), note = _where_they_are(algorithm, x, server, updates, clients)
    return bring(fresh, HOST), _all(variables, HOST), note


def _where_they_are(
    algorithm: Algorithm, x: State, server: Groups, updates: Sequence[Update], clients: int
) -> tuple[tuple[State, Groups], str]:
    """On the updates' own device; on the host if an algorithm of one's own makes tensors there."""
    device, note = place_of(update.y for update in updates), ""
    if device != HOST:
        try:
            there = algorithm.aggregate(bring(x, device), _all(server, device), updates, clients)
            return _checked(algorithm, there, x), ""
        except RuntimeError as error:
            note = f"the updates are aggregated on the host: {in_a_line(error)}"
            updates = [Update(bring(one.y, HOST), _all(one.extra, HOST), one.examples) for one in updates]
    return _checked(algorithm, algorithm.aggregate(x, server, updates, clients), x), note


def _checked(algorithm: Algorithm, made: tuple[State, Groups], x: State) -> tuple[State, Groups]:
    said = f"algorithm {algorithm.name!r}: aggregate returned"
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, dict) for part in made)):
        raise ConfigError(
            f"{said} {type(made).__name__}: expected (the new x, the server's new variables), two dicts."
        )
    for name in {**x, **made[0]}:
        got, expected = (_kind(state.get(name)) for state in (made[0], x))
        if got != expected:
            raise ConfigError(f"{said} {got} for {name!r}: expected {expected}.")
    for group, state in made[1].items():
        if not (isinstance(state, dict) and all(isinstance(tensor, Tensor) for tensor in state.values())):
            raise ConfigError(
                f"{said} {type(state).__name__} for the server's {group!r}: expected tensors by name."
            )
    return made


def _kind(tensor: object) -> str:
    if isinstance(tensor, Tensor):
        return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return "nothing" if tensor is None else type(tensor).__name__


def _all(groups: Groups, device: torch.device) -> Groups:
    return {group: bring(state, device) for group, state in groups.items()}
