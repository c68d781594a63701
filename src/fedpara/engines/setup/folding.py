"""Folding: every s rounds the base of each adapter takes in its change, and the factors start again.

    W = B_k + scale * compose(F)                      in the rounds of period k, t = k s + 1 .. (k + 1) s
    B_(k+1) = B_k + scale * compose(F^),   F = start(k + 1)        between two periods

F^ are the factors as the message that holds them is decoded, so both ends get the same base from a lossy downlink too.
start(k) depends on the run's seed and k only, and compose(start(k)) = 0: a restart sends no bytes and changes no
weight. B_0 is the model's own initialisation. This is FedLoRU's and FedMUD's update form.

In the first round of a period the factors are start(k), so the server's message leaves them out.

A fold is one message: the factors F^, in the downlink's encoding. A client has the base of the last round in which the
server accepted its update. In round t it receives every fold since then, or a float32 copy of the base in their place,
whichever takes fewer bytes, and then the round's own message. All of them count as bytes sent down. B_0 costs nothing:
every client builds it from the experiment's seed. In one process the server's base serves all clients; on Flower each
node folds the base of its clients, and stores it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedpara.algorithms import Algorithm
from fedpara.engines.differences import PerClient
from fedpara.engines.program import Program, factors_of
from fedpara.engines.rng import torch_rng
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError
from fedpara.parameterization import Form, covered, initialise, inits
from fedpara.parameterization.factors import CUSTOM
from fedpara.parameterization.naming import BASE
from fedpara.state import State
from fedpara.wire import AnyMessage, Link, Message

REFUSED = ("gammas", "robust", "attack", "privacy", "secure", "rotate", "aggregation_error")
"""Settings that read or move factors in their own way."""


@dataclass(frozen=True, eq=False)
class Folds:
    """The folds so far; part of a checkpoint."""

    state: State  # the base of each adapter, and the fixed factors of this period
    sizes: tuple[int, ...] = ()  # the bytes of each fold's message
    last: Mapping[int, int] = field(default_factory=dict)  # how many folds each client has; 0 if missing
    messages: tuple[bytes, ...] = ()  # the last folds, as many as a client may need


@dataclass(frozen=True, eq=False)
class OntoBase(PerClient):
    """A round's message, and the tensors that it leaves out: the base and, after a restart, the factors."""

    beside: State
    folds: Folds
    copy: Message  # the base in float32
    every: int

    def bytes_to(self, client: int) -> int:
        """The bytes of the round's message, and of the folds (or the copy of the base) that the client still needs."""
        return len(self) + min(self._missed(client), len(self.copy))

    def to(self, client: int) -> tuple[AnyMessage, ...]:
        if self._missed(client) > len(self.copy):
            return self.copy, self
        count = len(self.folds.sizes) - self.folds.last.get(client, 0)
        return (*self.folds.messages[len(self.folds.messages) - count :], self)

    def last(self, client: int) -> int:
        """The round after which the client's base was folded."""
        return self.every * self.folds.last.get(client, 0)

    def _missed(self, client: int) -> int:
        return sum(self.folds.sizes[self.folds.last.get(client, 0) :])


@dataclass(frozen=True, eq=False)
class Folding:
    every: int
    seed: int
    forms: Mapping[str, Form]
    """By the name of each weight that has a base."""
    inits: Mapping[str, str | None]
    initial: State
    """The model before the first round."""

    def folds(self, round: int) -> int:
        """How many folds precede this round."""
        return (round - 1) // self.every

    def restarts(self, round: int) -> bool:
        """Whether the factors are start(k) at the beginning of this round."""
        return (round - 1) % self.every == 0

    @cached_property
    def factors(self) -> frozenset[str]:
        """The names of the factors that train."""
        return frozenset(
            f"{weight}.{factor}"
            for weight, form in self.forms.items()
            for factor in form.factors
            if factor not in form.scheme.fixed
        )

    @cached_property
    def bases(self) -> tuple[str, ...]:
        return tuple(f"{weight}.{BASE}" for weight in self.forms)

    def first(self) -> State:
        """B_0 and the fixed factors of the first period."""
        fixed = [name for w, form in self.forms.items() for name in factors_of(w, form) - self.factors]
        return {name: self.initial[name] for name in (*self.bases, *sorted(fixed))}

    def start(self, fold: int) -> State:
        """All factors at the beginning of the period after this fold."""
        if not fold:
            return {
                name: self.initial[name] for w, form in self.forms.items() for name in factors_of(w, form)
            }
        generator = torch_rng(self.seed, "restart", fold)
        found: State = {}
        for weight, form in self.forms.items():
            init = self.inits[weight]
            draw = initialise.adapter if init is None else initialise.named(init)
            made = initialise.unchanged(form, draw(form.whole, generator))
            for factor, tensor in zip(form.factors, made, strict=True):
                found[f"{weight}.{factor}"] = tensor.to(self.initial[f"{weight}.{factor}"])
        return found

    def beside(self, bases: State, round: int) -> State:
        """The tensors that a round's message leaves out: the base, fixed factors and, after a restart, all factors."""
        start = self.start(self.folds(round))
        known = start.keys() if self.restarts(round) else start.keys() - self.factors
        return {**bases, **{name: start[name] for name in sorted(known)}}

    def folded(self, state: State, received: State) -> State:
        """The bases after a fold of the received factors. `state` holds the bases and the fixed factors before it."""
        now = {**state, **received}
        return {
            f"{weight}.{BASE}": form.compose_onto(
                now[f"{weight}.{BASE}"], [now[f"{weight}.{factor}"] for factor in form.factors]
            )
            for weight, form in self.forms.items()
        }


def make_folding(
    program: Program, algorithm: Algorithm, link: Link, every: int | None, seed: int
) -> Folding | None:
    """The folding of the program's adapters; None if the run does not fold. ConfigError if it cannot."""
    if every is None:
        return None
    for problem in _problems(program, algorithm, link):
        raise ConfigError(f"fold_every adds the factors of adapters to their base, and {problem}")
    forms, named = program.forms, inits(program.model)
    return Folding(every, seed, forms, {weight: named[weight] for weight in forms}, program.initial)


def _problems(program: Program, algorithm: Algorithm, link: Link) -> Iterator[str]:
    x, named = program.start(program.shared), inits(program.model)
    adapters = [weight for weight, form in program.forms.items() if form.scale is not None]
    if not adapters:
        yield 'this model has none: factorize it with onto="frozen", train="*".'
    if others := program.forms.keys() - set(adapters):
        yield f'{min(others)} is a whole weight of factors: factorize it with onto="frozen" too.'
    if program.local:
        yield "parts of this model are private: use lowrank, fedpara or a scheme of FedMUD, and share all."
    if program.half_frozen:
        yield f"some factors of {program.half_frozen} are frozen: let all of them train."
    if over := covered(program.model):
        yield f"{over} has another parametrization on top of its factors: remove it."
    if drawn := next((weight for weight in adapters if named[weight] == CUSTOM), ""):
        yield f"the factors of {drawn} come from a custom function: use a named initialiser, such as 'calibrated:2'."
    if any((algorithm.server_init(x), algorithm.client_init(x))) or algorithm.personal is not None:
        yield f"{algorithm.name} keeps variables that belong to the old factors: use fedavg or fedprox."
    for name in ("jacobian", "keep_optimizer"):
        if getattr(algorithm.local, name):
            yield f"{name} depends on the factors before the fold: leave it out."
    if link.uplink.feedback or link.downlink.sends_differences:
        yield "a link keeps residues or differences of the old factors: use int8 or more down, and no feedback."


def refuse_with_folding(settings: Settings) -> None:
    """ConfigError for settings that do not work in a run that folds."""
    if settings.fold_every is None:
        return
    if settings.products != "mean":
        raise ConfigError("fold_every and products each decide where a product goes: leave one of them out.")
    if taken := next((name for name in REFUSED if getattr(settings, name)), ""):
        raise ConfigError(f"fold_every replaces the factors that {taken} follows: leave one of them out.")
