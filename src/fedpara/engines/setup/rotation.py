"""Rotation: in each round one factor of every weight trains and travels to the server; its other factors stay as sent.

    round t:  a weight with the shared factors F_0 .. F_(k-1) trains F_((t-1) mod k)

W is linear in one factor, so the mean of the clients' weights is the weight of the mean factor, exactly:

    mean_i W(F_i, rest) = W(mean_i F_i, rest)

If all factors train, this does not hold: the products of the clients' changes are lost. Uploads shrink by about k.
Tensors that are not factors, such as biases, and private factors train in every round. Downloads hold the whole model,
because most clients of a round did not see the last one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fedpara.algorithms import Algorithm, Variables
from fedpara.algorithms.core import variable
from fedpara.algorithms.optimizers import build_optimizer
from fedpara.engines.program import Program
from fedpara.errors import ConfigError
from fedpara.state import State

ROTATION, TURN = "rotation", "turn"
"""The variable that tells a client's steps which factors train, and its only tensor. It follows from the round, so it
is not sent."""


@dataclass(frozen=True)
class Rotation:
    places: Mapping[str, tuple[int, int]]
    """(j, k) by the name of a factor: it is number j of the k shared factors of its weight"""

    def resting(self, round: int) -> frozenset[str]:
        """The names of the factors that are neither trained nor sent in this round."""
        return frozenset(name for name, (j, k) in self.places.items() if (round - 1) % k != j)

    def turn(self, round: int) -> Variables:
        return {ROTATION: {TURN: torch.tensor(round - 1)}}

    def masked(self, g: State, down: Variables) -> State:
        """The gradient with zeros for the factors that rest. Tensor operations only: a captured step reads the turn."""
        turn = variable(down, ROTATION).get(TURN)
        if turn is None:  # a check outside any round
            return g
        return {
            name: tensor * (turn % self.places[name][1] == self.places[name][0]).to(tensor.dtype)
            if name in self.places
            else tensor
            for name, tensor in g.items()
        }

    def of(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm, whose steps leave the resting factors as they are."""

        def correct(g: State, y: State, x: State, down: Variables, client: Variables) -> State:
            return self.masked(algorithm.correct(g, y, x, down, client), down)

        return replace(algorithm, correct=correct)


def make_rotation(program: Program, algorithm: Algorithm) -> Rotation:
    """The rotation of the program's shared factors. ConfigError if it would not be exact."""
    for problem in _problems(program, algorithm):
        raise ConfigError(f"rotate trains one factor of each weight per round, and {problem}")
    places: dict[str, tuple[int, int]] = {}
    for weight, form in program.forms.items():
        names = [name for factor in form.factors if (name := f"{weight}.{factor}") in set(program.shared)]
        places |= {name: (j, len(names)) for j, name in enumerate(names)}
    return Rotation(places)


def _problems(program: Program, algorithm: Algorithm) -> Iterator[str]:
    local, x = algorithm.local, program.start(program.shared)
    if not any(form.factors for form in program.forms.values()) or not x:
        yield "this model shares no factorized weight: choose a scheme, such as fedpara."
    curved = next((weight for weight, form in program.forms.items() if form.scheme.nonlinearity), "")
    if curved:
        yield f"{curved} is not linear in a factor: leave out nonlinearity."
    variables = algorithm.server_init(x), algorithm.client_init(x)
    if any(variables):
        yield f"the variables of {algorithm.name} would also move the resting factors: use fedavg or fedprox."
    for name in ("jacobian", "keep_optimizer"):
        if getattr(local, name):
            yield f"{name} needs all factors to train: leave it out."
    optimizer, y = build_optimizer(local), {"w": torch.ones(2)}
    stepped, _ = optimizer.step(y, {"w": torch.zeros(2)}, optimizer.init(y), local.lr)
    if not torch.equal(stepped["w"], y["w"]):
        yield "the local optimizer also moves a tensor without gradient: set weight_decay to 0, or use sgd."
