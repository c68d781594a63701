"""Aggregation: the updates that were admitted become the server's next model, on the device where they are.

    mean of the updates, added up as they come in;   x, server = step(x, server, mean, N), checked, and to the host

An algorithm whose `aggregate` is not a `FromMean` may need every update: its updates are held until the last one.
"""

from collections.abc import Mapping
from dataclasses import replace

from fedpara.algorithms import Algorithm, FromMean, Groups, Update
from fedpara.algorithms.core import MeanOfUpdates, expect_groups, expect_like
from fedpara.engines.freight import HOST, bring, bring_groups, place_of
from fedpara.errors import ConfigError
from fedpara.state import State, WeightedSum


class Intake:
    """A round's updates on their way into the aggregate, in the order in which `take` is called.

    `weights` holds w_i of every client that may answer: its number of examples, unless the run caps it or weights all
    alike.
    """

    def __init__(self, algorithm: Algorithm, x: State, weights: Mapping[int, float]) -> None:
        self._algorithm, self._x, self._weights = algorithm, x, weights
        aggregate, total = algorithm.aggregate, sum(weights.values())
        uniform = isinstance(aggregate, FromMean) and aggregate.weights == "uniform"
        self._buffers = WeightedSum(total)
        self._mean = MeanOfUpdates(x, float(len(weights)) if uniform else total)
        self._held: list[Update] = []

    def take(self, client: int, update: Update, buffers: State) -> None:
        update, aggregate = replace(update, weight=self._weights[client]), self._algorithm.aggregate
        self._buffers.add(buffers, self._weights[client])
        if isinstance(aggregate, FromMean):
            self._mean.add(update, aggregate.weight(update))
        else:
            self._held.append(update)

    def aggregate(self, server: Groups, clients: int) -> tuple[State, Groups, State]:
        """(the next x, the server's variables, the mean of the buffers), all on the host.

        ConfigError in the round that made it, where x is not like the model: the next round could not send it.
        """
        aggregate = self._algorithm.aggregate
        if isinstance(aggregate, FromMean):
            mean = self._mean.result()
            device = place_of([mean.y])
            made = aggregate.step(bring(self._x, device), bring_groups(server, device), mean, clients)
        else:
            device = place_of(update.y for update in self._held)
            made = aggregate(bring(self._x, device), bring_groups(server, device), self._held, clients)
        fresh, variables = _checked(self._algorithm, made, self._x)
        return bring(fresh, HOST), bring_groups(variables, HOST), bring(self._buffers.mean(), HOST)


def _checked(algorithm: Algorithm, made: tuple[State, Groups], x: State) -> tuple[State, Groups]:
    said = f"algorithm {algorithm.name!r}: aggregate returned"
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, dict) for part in made)):
        raise ConfigError(
            f"{said} {type(made).__name__}: expected (the new x, the server's new variables), two dicts."
        )
    expect_like(algorithm.name, "aggregate", made[0], x)
    expect_groups(algorithm.name, "aggregate", made[1])
    return made
