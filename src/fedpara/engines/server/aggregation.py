"""Turns a round's accepted updates into the server's next model, on the updates' device.

    mean = sum_i w_i (y_i, extra_i) / sum_i w_i, summed as updates arrive;   x, server = step(x, server, mean, N)

A custom `aggregate` that is not a `FromMean` may need every update, so its updates are held until the last one.

    examples    w_i = n_i            uniform    w_i = 1
    max_share   w_i = min(n_i, c) with the largest c for which w_i <= max_share * sum_j w_j
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedpara.algorithms import Algorithm, FromMean, Update, Variables
from fedpara.algorithms.core import (
    Mean,
    MeanOfUpdates,
    Weighting,
    custom,
    expect_like,
    expect_same,
    expect_variables,
)
from fedpara.engines.server.guard import Guard
from fedpara.engines.server.products import AggregationError, ComposedMean, Products
from fedpara.engines.transfer import move, move_variables
from fedpara.errors import ConfigError
from fedpara.state import State, WeightedSum, device_of
from fedpara.wire import unpack
from fedpara.wire.rows import RowMessage, Rows


class Aggregator:
    """Sums one round's updates, in the order of the calls to `add`.

    `weights` holds w_i of every client that may reply, and `buffers` those of the server before the round.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        x: State,
        weights: Mapping[int, float],
        guard: Guard | None = None,
        *,
        buffers: State | None = None,
        products: Products | None = None,
    ) -> None:
        self._algorithm, self._x, self._weights, self._guard = algorithm, x, weights, guard
        self._now = buffers or {}
        aggregate, total = algorithm.aggregate, sum(weights.values())
        uniform = isinstance(aggregate, FromMean) and aggregate.weights == "uniform"
        self._buffers = WeightedSum(total)
        expected = float(len(weights)) if uniform else total
        self._mean = MeanOfUpdates(x, expected)
        self._composed = ComposedMean(products, expected) if products is not None else None
        self.error: AggregationError | None = None
        """set by `aggregate`, if the run measures it"""
        self._held: list[Update] = []
        self._count = 0
        self._guarded: list[tuple[int, Update, State]] = []
        self._uniform = uniform
        self._in_rows = guard is None and products is None and isinstance(aggregate, FromMean)
        self._blocks = WeightedSum(expected)
        self._rows: Rows | None = None  # of all updates of the round, if they arrive as rows

    def add(self, client: int, update: Update, buffers: State) -> None:
        """Adds an accepted update and the buffers that came with it."""
        update = replace(update, weight=self._weights[client], client=client)
        aggregate = self._algorithm.aggregate
        if self._guard is not None:
            self._guarded.append((client, update, buffers))
            return
        self._buffers.add(buffers, self._weights[client])
        if isinstance(aggregate, FromMean):
            self._mean.add(update, aggregate.weight(update))
            if self._composed is not None:
                self._composed.add(update.y, aggregate.weight(update))
        else:
            self._held.append(update)

    def add_row(self, client: int, message: RowMessage, examples: int, loss: float) -> None:
        """Adds an accepted message of `Rows`; a round has either such messages only, or none."""
        rows, weight = message.rows, self._weights[client]
        if self._in_rows and (rows is self._rows or self._one_weight(rows)):
            self._rows, self._count = rows, self._count + 1
            self._blocks.add(message.blocks, 1.0 if self._uniform else weight)
            self._buffers.add({}, weight)
            return
        y, buffers, variables = self._split(message.tensors)
        self.add(client, Update(y, variables, examples, loss=loss), buffers)

    def _one_weight(self, rows: Rows) -> bool:
        """Whether all numbers of a message, its buffers too, have one weight and are summed in their own types."""
        if any(rows.spec[name][0] != tensor.dtype for name, tensor in self._x.items()):
            return False
        return not self._uniform or all(name in self._x or "/" in name for name in rows.spec)

    def _split(self, state: State) -> tuple[State, State, Variables]:
        """(the parameters, the buffers, the variables)"""
        variables = unpack(state)
        model = variables.pop("")
        y = {name: model[name] for name in self._x}
        return y, {name: tensor for name, tensor in model.items() if name not in y}, variables

    @property
    def arrived(self) -> float:
        """sum_i w_i over the updates so far"""
        return self._buffers.arrived

    def aggregate(self, server: Variables, clients: int, round: int = 0) -> tuple[State, Variables, State]:
        """(the next x, the server's variables, the mean of the buffers), all on the updates' device."""
        aggregate = self._algorithm.aggregate
        if self._guard is not None:
            device = device_of(update.y for _, update, _ in self._guarded)
            given = move(self._x, device), move_variables(server, device), move(self._now, device)
            made, averages = self._guard.aggregate(self._algorithm, *given, self._guarded, clients, round)
            return *_checked(self._algorithm, made, self._x, server), averages
        if isinstance(aggregate, FromMean):
            mean, averages = self._means()
            device = device_of([mean.y])
            x = move(self._x, device)
            if self._composed is not None:
                y, self.error = self._composed.aggregated(x, mean.y)
                mean = replace(mean, y=y)
            with custom(
                f"algorithm {self._algorithm.name!r}: FromMean's step", "step(x, server, mean, clients)"
            ):
                made = aggregate.step(x, move_variables(server, device), mean, clients)
        else:
            device = device_of(update.y for update in self._held)
            with custom(
                f"algorithm {self._algorithm.name!r}: aggregate", "aggregate(x, server, updates, clients)"
            ):
                made = aggregate(move(self._x, device), move_variables(server, device), self._held, clients)
            averages = self._buffers.mean()
        return *_checked(self._algorithm, made, self._x, server), averages

    def _means(self) -> tuple[Mean, State]:
        """The means of the updates and of the buffers."""
        if self._rows is None:
            return self._mean.result(), self._buffers.mean()
        y, averages, variables = self._split(self._rows.cut(self._blocks.mean()))
        return Mean(y, variables, self._count), averages


def _checked(
    algorithm: Algorithm, made: tuple[State, Variables], x: State, server: Variables
) -> tuple[State, Variables]:
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, dict) for part in made)):
        raise ConfigError(
            f"algorithm {algorithm.name!r}: aggregate returned {type(made).__name__}: expected (the new x, the "
            "server's new variables), two dicts."
        )
    expect_like(f"algorithm {algorithm.name!r}: aggregate", made[0], x)
    variables = expect_variables(f"algorithm {algorithm.name!r}: aggregate", made[1])
    expect_same(f"algorithm {algorithm.name!r}: aggregate", variables, server)
    return made


def round_weights(
    counts: Mapping[int, int], weighting: Weighting, max_share: float | None
) -> tuple[dict[int, float], list[str]]:
    """(the weight of each client that has examples, one note per capped client)"""
    present = {client: count for client, count in counts.items() if count}
    if weighting == "uniform":
        return dict.fromkeys(present, 1.0), []
    if max_share is None:
        return {client: float(count) for client, count in present.items()}, []
    weights = dict(zip(present, capped(list(present.values()), max_share), strict=True))
    if max_share * len(present) < 1:
        return weights, [
            f"{len(present)} clients cannot each have at most {max_share:.0%} of a round's weight: all count the same"
        ]
    return weights, [
        f"client {client} with {present[client]} examples counts as {weight:.6g}: max_share limits each client to "
        f"{max_share:.0%} of a round's weight"
        for client, weight in weights.items()
        if weight < present[client]
    ]


def capped(counts: Sequence[float], max_share: float) -> list[float]:
    """The counts, capped so that none exceeds `max_share` of their sum; all equal if no cap achieves that."""
    present = sorted(count for count in counts if count > 0)
    if not present or present[-1] <= max_share * sum(present):
        return list(counts)
    # With the m largest cut to c and the rest adding up to s: c = max_share (s + m c).
    rest = sum(present)
    for m, count in enumerate(reversed(present), 1):
        rest -= count
        if m * max_share >= 1:
            break
        c = max_share * rest / (1 - m * max_share)
        below = present[-m - 1] if m < len(present) else 0.0
        if c >= below and c > 0:
            return [min(count, c) for count in counts]
    return [min(count, present[0]) for count in counts]
