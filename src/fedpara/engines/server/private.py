"""The server's part of user-level privacy: a sum of bounded updates with noise, in place of the mean.

    d_i = (y_i - x) min(1, C / ||y_i - x||);   y = x + (sum_i d_i + N(0, (z C)^2)) / (q N)

The denominator is the expected cohort, so it does not depend on who takes part. Clients clip before they send, and the
server clips again: it does not rely on them. The algorithm's step then goes from x towards y, as from any mean.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fedpara.algorithms import FromMean, Update, Variables
from fedpara.algorithms.core import Mean
from fedpara.engines.distributed.process_group import join
from fedpara.engines.progress import Progress, Schedule
from fedpara.engines.server.products import AggregationError
from fedpara.engines.session import Session
from fedpara.engines.transfer import HOST, move, move_variables
from fedpara.privacy import Privacy, Spending, User
from fedpara.privacy.clipping import clip_update, is_below, next_bound
from fedpara.privacy.kinds import CLIP, PRIVACY
from fedpara.privacy.randomness import Noise, fresh_key, seeded_key
from fedpara.state import State, device_of


class PrivateSum:
    """Sums one round's updates. `names` are the tensors that clients send in this round."""

    error: AggregationError | None = None

    def __init__(
        self,
        session: Session,
        spending: Spending,
        x: State,
        server: Variables,
        names: tuple[str, ...],
    ) -> None:
        assert isinstance(spending.kind, User)
        self._algorithm, self._kind, self._spending = session.algorithm, spending.kind, spending
        self._x, self._names = x, names
        self.bound = bound_of(spending.kind, server)
        self._known = {HOST.type: x}
        self._sum: State = {}
        self._below = 0.0

    def add(self, client: int, update: Update, buffers: State) -> None:
        """Adds an accepted update, clipped to the bound."""
        device = device_of([update.y])
        if device.type not in self._known:
            self._known[device.type] = move(self._x, device)
        x = self._known[device.type]
        d, norm = clip_update({name: (update.y[name] - x[name]).double() for name in self._names}, self.bound)
        self._below += is_below(norm, self.bound) - 0.5
        if not self._sum:
            self._sum = d  # its tensors were made here
        else:
            torch._foreach_add_([self._sum[name] for name in d], list(d.values()))

    def aggregate(self, server: Variables, clients: int, round: int) -> tuple[State, Variables, State]:
        """(the next x, the server's variables, no buffers), all on the host."""
        device = device_of([self._sum])
        x, noise = move(self._x, device), Noise(noise_key(self._spending, round))
        cohort, kind = self._spending.cohort, self._kind
        scale = kind.update_noise(cohort) * self.bound
        zeros = {name: torch.zeros_like(x[name], dtype=torch.float64) for name in self._names}
        drawn = noise.like(zeros)
        y = dict(x)
        for name, total in (self._sum or zeros).items():
            y[name] = (x[name] + (total + scale * drawn[name]) / cohort).to(x[name].dtype)
        own = {name: state for name, state in server.items() if name != PRIVACY}
        aggregate = self._algorithm.aggregate
        assert isinstance(aggregate, FromMean)
        fresh, variables = aggregate.step(x, move_variables(own, device), Mean(y, {}, cohort), clients)
        if kind.quantile is not None:
            share = (self._below + kind.bits(cohort) * float(noise.draw(1)[0])) / cohort + 0.5
            bound = next_bound(self.bound, share, kind.quantile, kind.clip_rate)
            variables = {**variables, PRIVACY: {CLIP: torch.tensor(bound, dtype=torch.float32)}}
        return move(fresh, HOST), move_variables(variables, HOST), {}


def noise_key(spending: Spending, round: int) -> bytes:
    """The key of this round's noise, the same on every rank."""
    if spending.seed is not None:
        return seeded_key(spending.seed, round)
    return bytes.fromhex(join().agreed(f"the noise of round {round}", fresh_key().hex()))


def bound_of(kind: Privacy, server: Variables) -> float:
    """C of this round."""
    return float(server[PRIVACY][CLIP]) if kind.adaptive else kind.bound


def private_sum(session: Session, schedule: Schedule, progress: Progress, round: int) -> PrivateSum | None:
    """The sum of a run with user-level privacy, or None for any other run."""
    spending = schedule.spending
    if spending is None or not isinstance(spending.kind, User):
        return None
    names = tuple(name for name in session.program.shared if name not in session.resting(round))
    return PrivateSum(session, spending, progress.x, progress.server, names)


def budget_notes(schedule: Schedule, round: int) -> list[str]:
    """Why the run ends after this round, if its budget is spent."""
    spending = schedule.spending
    if spending is None or round >= schedule.rounds or not spending.spent(round):
        return []
    cost = spending.epsilon(round + 1)
    return [
        f"stopped after round {round}: one more costs epsilon {cost:.4g}, above the budget of {spending.budget:g}"
    ]


def spent_after(schedule: Schedule, server: Variables, round: int) -> Mapping[str, Any] | None:
    """What the run has spent after this round; None if it is not private. `server` is as before the round."""
    spending = schedule.spending
    return None if spending is None else spending.line(round, bound_of(spending.kind, server))
