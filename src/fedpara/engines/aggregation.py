"""Aggregation: the updates that were admitted become the server's next model, on the device where they are.

x, server = algorithm.aggregate(x, server, updates, N), checked, and from there to the host
"""

from collections.abc import Sequence

from fedpara.algorithms import Algorithm, Groups, Update
from fedpara.algorithms.core import expect_groups, expect_like
from fedpara.engines.freight import HOST, bring, bring_groups, place_of
from fedpara.errors import ConfigError
from fedpara.state import State


def aggregated(
    algorithm: Algorithm, x: State, server: Groups, updates: Sequence[Update], clients: int
) -> tuple[State, Groups]:
    """ConfigError in the round that made it, where it is no model like x: the next one, if any, could not send it."""
    device = place_of(update.y for update in updates)
    made = algorithm.aggregate(bring(x, device), bring_groups(server, device), updates, clients)
    fresh, variables = _checked(algorithm, made, x)
    return bring(fresh, HOST), bring_groups(variables, HOST)


def _checked(algorithm: Algorithm, made: tuple[State, Groups], x: State) -> tuple[State, Groups]:
    said = f"algorithm {algorithm.name!r}: aggregate returned"
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, dict) for part in made)):
        raise ConfigError(
            f"{said} {type(made).__name__}: expected (the new x, the server's new variables), two dicts."
        )
    expect_like(algorithm.name, "aggregate", made[0], x)
    expect_groups(algorithm.name, "aggregate", made[1])
    return made
