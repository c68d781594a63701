"""The result of a round, the server's state between rounds, and the schedule of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedpara.algorithms import Variables
from fedpara.algorithms.core import Weighting
from fedpara.engines.differences import Known
from fedpara.engines.participation.cohorts import Cohorts, Sampler, uniform
from fedpara.engines.participation.devices import Devices
from fedpara.engines.server.products import AggregationError, Products
from fedpara.engines.setup.folding import Folds
from fedpara.engines.transfer import HOST, move, move_variables
from fedpara.privacy import Spending
from fedpara.secure import SecAgg
from fedpara.state import State, device_of, in_words
from fedpara.tasks.metrics import Score, shown

if TYPE_CHECKING:
    from fedpara.engines.server.guard import Guard
    from fedpara.engines.server.levels import Levels


@dataclass(frozen=True, eq=False)
class Progress:
    """The server's state between two rounds: everything a checkpoint needs."""

    round: int
    x: State
    buffers: State
    server: Variables
    bytes_up: int = 0
    bytes_down: int = 0
    clock: float | None = None  # simulated seconds so far; None without `devices`
    known: Known | None = None  # on a downlink that sends differences
    folds: Folds | None = None  # in a run that folds: the base

    @property
    def model(self) -> State:
        """The shared model: parameters, buffers, and the base in a run that folds."""
        return {**self.x, **self.buffers, **(self.folds.state if self.folds else {})}

    def on_host(self) -> "Progress":
        """The same, with the model, the server's variables and what the clients know on the host."""
        known = self.known.state if self.known else {}
        if device_of([self.x, self.buffers, *self.server.values(), known]) == HOST:
            return self
        return replace(
            self,
            x=move(self.x, HOST),
            buffers=move(self.buffers, HOST),
            server=move_variables(self.server, HOST),
            known=self.known and self.known.on_host(),
        )

    def __repr__(self) -> str:
        sent = f"{self.bytes_up:,} bytes up, {self.bytes_down:,} down"
        return f"Progress(round {self.round}, {sent}, model of {in_words({**self.x, **self.buffers})})"


@dataclass(frozen=True)
class Everyone:
    """Scores of the clients' own models after the last aggregation, each on its own test data."""

    score: float  # the mean over the clients of the primary metric
    clients: int  # how many were scored
    of: int  # how many are in the federation
    bytes_down: int  # for sending them the model; not part of any round's bytes
    worst_tenth: float  # the mean over the tenth of the clients with the worst scores
    spread: float  # the standard deviation over the clients
    by_client: Mapping[int, Score] = field(repr=False)  # also of clients whose score is not finite


@dataclass(frozen=True, eq=False)
class Round:
    """The result of one round. `scores` by metric is empty if nothing was measured."""

    progress: Progress
    cohort: tuple[int, ...]
    train_loss: float
    bytes_up: int
    bytes_down: int
    refused: tuple[tuple[int, str], ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    before: float | None = None
    after: float | None = None
    notes: tuple[str, ...] = field(default=())
    memories: tuple[int, ...] = ()  # the clients whose memories this round replaced
    everyone: Everyone | None = None  # at the end of a run whose clients have test data
    worst_tenth: float | None = None  # of the cohort's own models after training; `after` is their mean
    spread: float | None = None
    primary: str = "accuracy"  # the metric of `before`, `after` and `everyone`
    aggregation_error: AggregationError | None = None  # if the run measures it
    privacy: Mapping[str, Any] | None = None  # what a private run has spent: epsilon, epsilon_rdp, delta, ...

    @property
    def score(self) -> float | None:
        """The primary metric; None if it was not measured."""
        return self.scores.get(self.primary)

    @property
    def accuracy(self) -> float | None:
        return self.scores.get("accuracy")

    @property
    def loss(self) -> float | None:
        """The loss on the test data."""
        return self.scores.get("loss")

    @property
    def number(self) -> int:
        return self.progress.round

    @property
    def clock(self) -> float | None:
        """Simulated seconds from the start of the run to the end of this round; None without `devices`."""
        return self.progress.clock

    def __repr__(self) -> str:
        score = "not measured" if self.score is None else shown(self.primary, self.score)
        refused = f" ({len(self.refused)} refused)" * bool(self.refused)
        sent = f"{self.bytes_up:,} bytes up, {self.bytes_down:,} down"
        clients = f"{len(self.cohort)} client{'s' * (len(self.cohort) != 1)}"
        loss = f"train loss {self.train_loss:.4g}"
        return f"Round({self.number}, {clients}{refused}, {loss}, {self.primary} {score}, {sent})"


@dataclass(frozen=True)
class Schedule:
    rounds: int
    clients: int
    cohort: int
    examples: Callable[[int], int]  # how many a client has; 0 if not known yet
    evaluate_every: int = 1
    max_norm: float | None = None
    target: float | None = None
    minimum: int = 1  # usable updates; with fewer the model stays unchanged
    weights: Weighting = "examples"  # how a mean over clients is weighted
    max_share: float | None = None  # the largest share of a round's weight for one client
    primary: str = "accuracy"  # the metric of `target`
    sampler: Sampler = uniform
    lost: float = 0.0  # the probability that a chosen client is lost
    devices: Devices | None = None
    patience: int | None = None  # evaluations without a better score after which the run stops
    higher_is_better: bool = True  # the direction of the score
    products: Products | None = None  # what the server does with composed weights
    levels: "Levels | None" = None  # a gamma per client
    guard: "Guard | None" = None  # a defence against hostile clients, and a simulated attack
    spending: Spending | None = None  # of a private run
    secure: SecAgg | None = None  # the server gets the sum of the updates only

    def cohorts(self, seed: int) -> Cohorts:
        return Cohorts(seed, self.clients, self.cohort, self.sampler, self.lost)

    def evaluates(self, round: int) -> bool:
        return round % self.evaluate_every == 0 or round == self.rounds

    def evaluated(self, result: Round) -> list[float]:
        """The round's score, if patience counts it.

        The extra evaluation of a last round does not count: with more rounds it would not take place.
        """
        score = result.score
        counts = score is not None and math.isfinite(score) and result.number % self.evaluate_every == 0
        return [score] if counts and score is not None else []

    def ends(self, result: Round, past: Sequence[float] = ()) -> bool:
        """Whether the run is over: all rounds are done, the target is met, the patience or the budget is used up.

        `past` holds what `evaluated` gave in earlier rounds.
        """
        done, scores = result.number >= self.rounds, [*past, *self.evaluated(result)]
        spent = self.spending is not None and self.spending.spent(result.number)
        return done or self.reaches_target(result.score) or self.has_stalled(scores) or spent

    def reaches_target(self, score: float | None) -> bool:
        if self.target is None or score is None:
            return False
        return score >= self.target if self.higher_is_better else score <= self.target

    def has_stalled(self, scores: Sequence[float]) -> bool:
        """Whether the last `patience` scores are no better than the best one before them."""
        if self.patience is None or not scores:
            return False
        best = max(scores) if self.higher_is_better else min(scores)
        return len(scores) - 1 - scores.index(best) >= self.patience
