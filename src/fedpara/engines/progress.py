"""The result of a round, the server's state between rounds, and the schedule of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedpara.algorithms import Variables
from fedpara.algorithms.core import Weighting
from fedpara.state import State, in_words
from fedpara.tasks.metrics import shown


@dataclass(frozen=True, eq=False)
class Progress:
    """The server's state between two rounds: everything a checkpoint needs."""

    round: int
    x: State
    buffers: State
    server: Variables
    bytes_up: int = 0
    bytes_down: int = 0

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
    primary: str = "accuracy"  # the metric of `before`, `after` and `everyone`

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
    higher_is_better: bool = True

    def evaluates(self, round: int) -> bool:
        return round % self.evaluate_every == 0 or round == self.rounds

    def ends(self, result: "Round") -> bool:
        """Whether the run is over: all rounds are done, or the target is met."""
        return self._meets_target(result.score) or result.number >= self.rounds

    def _meets_target(self, score: float | None) -> bool:
        if self.target is None or score is None:
            return False
        return score >= self.target if self.higher_is_better else score <= self.target
