"""Recycling (FedLUAR, Lee et al. 2025): some layers with small updates are not sent; the server repeats their last one.

    u_l = the mean update of layer l;   s_l = ||u_l|| / ||x_l||
    for the next round, n layers are drawn without replacement with P(l) proportional to 1 / s_l
    in that round clients train all layers and send the others; u_l of a drawn layer is the one before

A layer is a module with a weight of two or more dimensions: its factors or its weight, and its bias. Everything else,
such as norms, travels in every round. The server tells the clients which layers were drawn. In the first round all
layers travel. Downloads hold the whole model, because recycled layers move as well.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedpara.algorithms import Algorithm, FromMean, Variables
from fedpara.algorithms.core import Mean, variable
from fedpara.engines.program import Program
from fedpara.engines.rng import numpy_rng
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError
from fedpara.state import State

RECYCLING, DRAWN, DRAWS = "recycling", "drawn", "draws"
"""The server's variable and its two tensors: a flag per layer (1: not sent in the next round), and the number of draws
so far."""
UPDATE = "recycling.update"
"""The server's variable with u, the last mean update of every layer."""
_TINY = float(np.finfo(np.float32).tiny)
OTHERS = ("rotate", "robust", "attack", "privacy", "secure", "gammas", "aggregation_error", "fold_every")


@dataclass(frozen=True)
class Recycling:
    layers: Mapping[str, tuple[str, ...]]
    """the names of each layer's shared tensors"""
    count: int
    seed: int

    def skipped(self, variables: Variables) -> frozenset[str]:
        """The names of the tensors that clients do not send, from the variables of the server or of its message."""
        drawn = variable(variables, RECYCLING).get(DRAWN)
        if drawn is None:  # a check outside any round
            return frozenset()
        flags = zip(self.layers.values(), drawn.tolist(), strict=True)
        return frozenset(name for names, flag in flags if flag for name in names)

    def of(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm, whose server repeats the last update of the layers that were not sent."""
        aggregate = algorithm.aggregate
        assert isinstance(aggregate, FromMean)
        inner = aggregate.step

        def server_init(x: State) -> Variables:
            none = {DRAWN: torch.zeros(len(self.layers), dtype=torch.uint8), DRAWS: torch.tensor(0)}
            update = {name: torch.zeros_like(x[name]) for names in self.layers.values() for name in names}
            return {**algorithm.server_init(x), RECYCLING: none, UPDATE: update}

        def broadcast(server: Variables) -> Variables:
            return {**algorithm.broadcast(_own(server)), RECYCLING: {DRAWN: server[RECYCLING][DRAWN]}}

        def step(x: State, server: Variables, mean: Mean, clients: int) -> tuple[State, Variables]:
            last, skipped = server[UPDATE], self.skipped(server)
            update = {name: last[name] if name in skipped else mean.y[name] - x[name] for name in last}
            y = mean.y | {name: x[name] + last[name] for name in skipped}
            made, own = inner(x, _own(server), replace(mean, y=y), clients)
            draws = server[RECYCLING][DRAWS] + 1
            drawn = {DRAWN: self.draw(made, update, int(draws)), DRAWS: draws}
            return made, {**own, RECYCLING: drawn, UPDATE: update}

        return replace(
            algorithm, server_init=server_init, broadcast=broadcast, aggregate=replace(aggregate, step=step)
        )

    def draw(self, x: State, update: State, number: int) -> torch.Tensor:
        """A flag per layer: 1 if it is not sent in the next round."""
        s = np.array([_norm(update, names) / _norm(x, names) for names in self.layers.values()])
        p = 1 / np.maximum(s, _TINY)
        generator = numpy_rng(self.seed, "recycle", number)
        chosen = generator.choice(len(s), self.count, replace=False, p=p / p.sum())
        drawn = torch.zeros(len(s), dtype=torch.uint8)
        drawn[torch.from_numpy(chosen)] = 1
        return drawn


def _own(server: Variables) -> Variables:
    """The algorithm's own variables."""
    return {name: state for name, state in server.items() if name not in (RECYCLING, UPDATE)}


def _norm(state: State, names: tuple[str, ...]) -> float:
    squares = sum(float(state[name].double().square().sum()) for name in names)
    return math.sqrt(max(squares, _TINY))


def make_recycling(program: Program, algorithm: Algorithm, count: int, seed: int) -> Recycling:
    """The recycling of the program's layers. ConfigError if there are too few, or if the algorithm cannot do it."""
    layers = layers_of(program)
    for problem in _problems(program, algorithm, count, len(layers)):
        raise ConfigError(f"recycle is {count}, and {problem}")
    return Recycling(layers, count, seed)


def layers_of(program: Program) -> dict[str, tuple[str, ...]]:
    """The shared tensors of each module with a weight of two or more dimensions."""
    owners = {
        f"{weight}.{factor}": weight for weight, form in program.forms.items() for factor in form.factors
    }
    found: dict[str, list[str]] = {}
    for name in program.shared:
        found.setdefault(owners.get(name, name).rpartition(".")[0], []).append(name)
    return {
        layer: tuple(names)
        for layer, names in found.items()
        if any(name in owners or program.initial[name].dim() >= 2 for name in names)
    }


def _problems(program: Program, algorithm: Algorithm, count: int, layers: int) -> Iterator[str]:
    if not 0 < count < layers:
        yield f"this model shares {layers} layers: expected 1 to {max(layers - 1, 1)}."
    x = program.start(program.shared)
    down = algorithm.broadcast(algorithm.server_init(x))
    extra, kept = algorithm.finish(x, x, down, algorithm.client_init(x), 1, 1.0)
    if not isinstance(algorithm.aggregate, FromMean) or extra or kept:
        yield f"{algorithm.name} needs every layer from its clients: use fedavg, fedprox or fedadam."


def refuse_others(settings: Settings) -> None:
    """ConfigError if another option needs every layer of an update."""
    taken = [name for name in OTHERS if getattr(settings, name)]
    taken += ["products"] * (settings.products != "mean")
    if settings.recycle and taken:
        raise ConfigError(
            f"recycle leaves out layers, and {taken[0]} needs every layer of an update: leave one of them out."
        )
