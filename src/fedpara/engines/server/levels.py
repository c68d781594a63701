"""Levels: a gamma per client, one model on the server.

Client i has gammas[i mod n]. Its model has the rank r of that gamma in every weight, and the server's has the rank R of
the largest. Factors are nested: a client receives, trains and returns the first r columns of X and Y and the first
r x r entries of the core T. Each entry of a factor becomes the mean over the clients that hold it:

    F[a] = sum_(i holds a) w_i F_i[a] / sum_(i holds a) w_i,   unchanged if no client of the round holds it

Before each round the server rotates the factors so that the first columns hold the most of each inner weight
(`parameterization.order`). The weights stay the same, and a small client gets the best part of its rank.

A small client's model is a real model of rank r: it costs the memory and the time of its rank, not of R.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedpara.algorithms import Variables
from fedpara.algorithms.fedavg import takes_mean
from fedpara.engines.program import Program, make_program
from fedpara.engines.progress import Progress, Schedule
from fedpara.engines.server.aggregation import Aggregator
from fedpara.engines.server.collect import Collected
from fedpara.engines.server.products import AggregationError
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings, read_gammas
from fedpara.engines.transfer import move
from fedpara.errors import ConfigError
from fedpara.parameterization import Form, Scheme, covered, factorize, forms, merge, write
from fedpara.parameterization.order import ordered
from fedpara.state import State, device_of, mean


@dataclass(frozen=True, eq=False)
class Levels:
    gammas: tuple[float, ...]
    sessions: Mapping[float, Session]
    """By gamma; the largest is the server's own."""

    def gamma_of(self, client: int) -> float:
        return self.gammas[client % len(self.gammas)]

    def ordered(self, progress: Progress) -> Progress:
        """The server's state with ordered factors: the same weights."""
        found, x = self.sessions[max(self.sessions)].program.forms, dict(progress.x)
        for weight, form in found.items():
            names = [f"{weight}.{factor}" for factor in form.factors]
            x |= zip(names, ordered(form, [x[name] for name in names]), strict=True)
        return replace(progress, x=x)

    def groups(
        self, progress: Progress, clients: Sequence[int]
    ) -> Iterator[tuple[Session, Progress, list[int]]]:
        """The clients by gamma, with the session and the part of the server's model that they share."""
        for gamma, session in self.sessions.items():
            some = [client for client in clients if self.gamma_of(client) == gamma]
            if some:
                yield session, replace(progress, x=cut(progress.x, session.program)), some

    def joined(self, x: State, found: Sequence[Collected]) -> Collected:
        """The results of all groups as one."""
        whole = Collected(seconds=max((one.seconds for one in found), default=0.0))
        for one in found:
            for part in ("replies", "refused", "notes", "diverged"):
                getattr(whole, part).extend(getattr(one, part))
        means = [one.aggregator for one in found if isinstance(one.aggregator, Aggregator)]
        whole.aggregator = Nested(x, means) if means else None
        return whole


class Nested:
    """Combines the means of all groups into the next model."""

    error: AggregationError | None = None

    def __init__(self, x: State, means: Sequence[Aggregator]) -> None:
        self._x, self._means = x, means

    def aggregate(self, server: Variables, clients: int, round: int = 0) -> tuple[State, Variables, State]:
        """(the next x, no variables, the mean of the buffers), all on the device of the first group's updates."""
        made = [one.aggregate(server, clients) for one in self._means]
        weights, device = [one.arrived for one in self._means], device_of(x for x, _, _ in made)
        y = mean_of_nested(move(self._x, device), [move(x, device) for x, _, _ in made], weights)
        return y, {}, mean([move(buffers, device) for *_, buffers in made], weights)


def cut(x: State, program: Program) -> State:
    """The leading part of each tensor that this smaller program has."""
    shapes = {name: program.initial[name].shape for name in x}
    return {name: t[tuple(map(slice, shapes[name]))].clone() for name, t in x.items()}


def mean_of_nested(x: State, parts: Sequence[State], weights: Sequence[float]) -> State:
    """The mean of each entry over the parts that hold it; x where none does."""
    found: State = {}
    for name, tensor in x.items():
        total = torch.zeros_like(tensor, dtype=torch.float64)
        held = torch.zeros_like(total)
        for part, weight in zip(parts, weights, strict=True):
            place = tuple(map(slice, part[name].shape))
            total[place] += weight * part[name].double()
            held[place] += weight
        found[name] = torch.where(held > 0, total / held.clamp_min(1e-300), tensor.double()).to(tensor.dtype)
    return found


def make_levels(session: Session, settings: Settings, personal: bool) -> Levels | None:
    """The levels of a run with several gammas; None if all clients have the same."""
    gammas = read_gammas(settings.gammas)
    if gammas is None:
        return None
    for problem in _problems(session, settings, personal, max(gammas)):
        raise ConfigError(f"gammas gives each client its own rank, and {problem}")
    if len(set(gammas)) == 1:
        return None
    model = session.program.model
    sessions = {
        gamma: session
        if gamma == max(gammas)
        else replace(session, program=make_program(_smaller(model, gamma), settings.share))
        for gamma in sorted(set(gammas))
    }
    return Levels(gammas, sessions)


def _problems(session: Session, settings: Settings, personal: bool, largest: float) -> Iterator[str]:
    program, algorithm = session.program, session.algorithm
    found = program.forms
    if not any(form.scheme.gamma is not None for form in found.values()):
        yield "no weight of this model has a rank that a gamma chose: factorize it with the largest gamma."
    for weight, form in found.items():
        if form.scheme.gamma not in (None, largest):
            yield f"{weight} has gamma {form.scheme.gamma}: factorize the model with the largest, {largest}."
        if form.scale is not None or program.half_frozen or program.fixed:
            yield f"{weight} is an adapter or has frozen factors: factorize the whole weight."
        if not form.scheme.nested:
            yield f"{weight} is written by {form.scheme.name}, whose factors are not nested: use fedpara or lowrank."
    if program.local:
        yield "parts of this model are private: use fedpara or lowrank, and share all."
    if over := covered(program.model):
        yield f"{over} has another parametrization on top of its factors: remove it."
    if not takes_mean(algorithm) or session.extras:
        yield f"{algorithm.name} needs the same tensors on every client: use fedavg or fedprox."
    if session.stateful or session.differences:
        yield (
            "states are kept between rounds: leave out keep_optimizer, error feedback, and downlinks below 8 bits."
        )
    if personal:
        yield "scores of the clients' own models need one model for all: set personal to False."
    if settings.products != "mean" or settings.aggregation_error:
        yield "products and aggregation_error compare weights of one rank: leave them out."
    if settings.max_share is not None:
        yield "max_share limits shares within one rank only: leave it out."
    for name in ("robust", "attack", "privacy", "rotate", "secure"):
        if getattr(settings, name):
            yield f"{name} needs the same tensors from every client: leave it out."
    if settings.engine == "flower":
        yield "Flower's nodes build one model: use engine sequential or batched."


def _smaller(model: torch.nn.Module, gamma: float) -> torch.nn.Module:
    """The same model at a smaller gamma. Its factors' values are drawn, and the server's replace them."""
    found = forms(model)

    def where(name: str, module: torch.nn.Module, parameter: str) -> bool | Scheme:
        form = found.get(f"{name}.{parameter}".lstrip("."))
        return False if form is None else _scheme(form, gamma)

    some = next(iter(found.values())).scheme
    return factorize(merge(model), some, where, force=True, generator=torch.Generator().manual_seed(0))


def _scheme(form: Form, gamma: float) -> Scheme:
    """The form's scheme at this gamma, unless the rank would not be smaller or was not chosen by gamma."""
    if form.scheme.gamma is None:
        return form.scheme
    smaller = replace(form.scheme, gamma=gamma)
    return smaller if write(smaller, form.shape).rank <= form.rank else form.scheme


def in_groups(
    session: Session, schedule: Schedule, progress: Progress, chosen: Sequence[int]
) -> list[tuple[Session, Progress, list[int]]]:
    """The cohort by what its clients receive: one group, unless clients have their own gammas."""
    if schedule.levels is None:
        return [(session, progress, list(chosen))]
    return list(schedule.levels.groups(progress, chosen))
