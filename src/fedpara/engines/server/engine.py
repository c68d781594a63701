"""Engine: what the server's loop asks of whatever runs the clients of a round."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from fedpara.engines.client import Reply
from fedpara.state import State
from fedpara.tasks import Score
from fedpara.wire import Message


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str:
        """How the clients run, and what was not possible and why."""

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterable[Reply]:
        """One reply per client, in the cohort's order."""

    def commit(self, round: int, clients: Sequence[int]) -> None:
        """Stores the new memories of these clients, whose updates the server accepted, and drops all others."""

    def evaluate(self, state: State) -> Score | None: ...

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterable[Reply]:
        """Each client's own model (the shared part from `message`, its private part from memory) on its test data.

        Nothing trains and no memory changes. The score is `Reply.before`; a reply without one states the reason.
        """
