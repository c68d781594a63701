"""Run: the result of `simulate`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from fedpara.engines.memory import ClientMemory
from fedpara.engines.participation.cohorts import LOST
from fedpara.engines.program import shared_names
from fedpara.engines.progress import Everyone, Progress, Round
from fedpara.engines.session import Session, own_part
from fedpara.errors import RunError
from fedpara.privacy.spending import in_words
from fedpara.state import State
from fedpara.tasks.metrics import shown

logger = logging.getLogger(__name__)


def tell_untrained(rounds: Sequence[Round]) -> None:
    """Warns of clients that were refused in each of their rounds, such as one whose data cannot be read."""
    reasons = {client: why for result in rounds for client, why in result.refused if why != LOST}
    for result in rounds:
        for client in {*result.cohort} - {client for client, _ in result.refused}:
            reasons.pop(client, None)
    if reasons:
        client, why = min(reasons.items())
        others = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        logger.warning("client %d was refused in each of its rounds%s: %s", client, others, why)


@dataclass(frozen=True, eq=False)
class Run:
    """The result of `simulate`. `state` is the whole model; its private parts are the initial ones.

    Only the last of `rounds` holds the server's tensors.
    """

    session: Session
    memory: ClientMemory
    rounds: tuple[Round, ...]
    engine: str  # the engine that ran, its settings, and why any feature was unavailable
    clients: int

    @property
    def progress(self) -> Progress:
        return self.rounds[-1].progress

    @property
    def state(self) -> State:
        return self._whole({})

    def client_state(self, client: int) -> State:
        """One client's own model: the shared part after the last aggregation, and the client's private part.

        If the algorithm has personal models, as Ditto has, it is the client's personal model.
        The client would begin its next round with this model. `Round.before` scores such a model; `Round.after` scores
        it after training, before aggregation.
        """
        if not 0 <= client < self.clients:
            raise RunError(f"client {client} is not in the federation: expected 0 to {self.clients - 1}.")
        return self._whole(own_part(self.memory.get(client) or {}))

    def _whole(self, private: State) -> State:
        """Every name of `model.state_dict()`, including those of tied weights."""
        program = self.session.program
        state = {**program.initial, **self.progress.model, **private}
        return state | {twin: state[name] for twin, name in shared_names(program.model).items()}

    @property
    def primary(self) -> str:
        """The name of the primary metric."""
        return self.rounds[-1].primary

    @property
    def score(self) -> float:
        """The last measured value of the primary metric."""
        return self._last(self.primary)

    @property
    def accuracy(self) -> float:
        """The last measured accuracy, a fraction."""
        return self._last("accuracy")

    def _last(self, metric: str) -> float:
        measured = [r.scores[metric] for r in self.rounds if metric in r.scores]
        if not measured:
            whose = "the clients" if self.session.program.local else "the Task or the clients"
            among_ = f" as a metric of the Task, and {whose}" if metric != self.primary else f" {whose}"
            raise RunError(f"no {metric} was measured: give{among_} test data.")
        return measured[-1]

    @property
    def everyone(self) -> Everyone | None:
        """The final scores over the clients, and in `by_client` of each one. None without test data per client."""
        return self.rounds[-1].everyone

    @property
    def privacy(self) -> Mapping[str, Any] | None:
        """What a private run has spent: `epsilon`, `epsilon_rdp` and `delta`. `private` is False with seeded noise."""
        return self.rounds[-1].privacy

    @property
    def bytes(self) -> int:
        return self.progress.bytes_up + self.progress.bytes_down

    def __repr__(self) -> str:
        last = next((r for r in reversed(self.rounds) if r.score is not None), None)
        measured = (
            f"{shown(last.primary, last.score)} after round {last.number}"
            if last and last.score is not None
            else "not measured"
        )
        privacy = f"    privacy: {in_words(dict(self.privacy))}\n" if self.privacy else ""
        engine = shorten(self.engine, 160, placeholder=" ...")
        return (
            f"Run({self.progress.round} rounds of {self.session.algorithm.name}, {self.bytes / 1e6:.2f} MB sent\n"
            f"    {self.primary}: {measured}\n{privacy}    engine: {engine})"
        )
