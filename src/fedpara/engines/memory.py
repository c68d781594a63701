"""What clients keep from round to round: private parameters, control variates. Made at a client's first round."""

from collections.abc import Sequence
from typing import Protocol

from fedpara.algorithms import Groups
from fedpara.engines.threads import at_once
from fedpara.state import clone


class ClientMemory(Protocol):
    """Asked from several threads at once, for a client each."""

    def get(self, client: int) -> Groups | None: ...

    def put(self, client: int, round: int, groups: Groups) -> None: ...


class InMemory:
    """In this process, by client: only those that have taken part cost anything."""

    def __init__(self) -> None:
        self._groups: dict[int, Groups] = {}

    def get(self, client: int) -> Groups | None:
        return self._groups.get(client)

    def put(self, client: int, round: int, groups: Groups) -> None:
        """Copied: what an engine hands over may be a sliver of its whole cohort's memory."""
        self._groups[client] = {name: clone(state) for name, state in groups.items()}

    def __len__(self) -> int:
        return len(self._groups)


class Held:
    """A memory whose newest round waits for the server's word.

    Only clients whose updates were taken keep what the round made of them: a control variate that moved
    without the server's would no longer be a part of its mean.
    """

    def __init__(self, memory: ClientMemory) -> None:
        self._memory = memory
        self._waiting: dict[int, Groups] = {}

    def get(self, client: int) -> Groups | None:
        return self._memory.get(client)

    def get_all(self, clients: Sequence[int]) -> list[Groups | None]:
        return at_once(self._memory.get, clients)

    def hold(self, client: int, groups: Groups) -> None:
        if any(groups.values()):  # most methods keep nothing
            self._waiting[client] = groups

    def keep(self, round: int, clients: Sequence[int]) -> None:
        """What these clients hold is theirs; what any other holds is dropped."""
        waiting, self._waiting = self._waiting, {}
        kept = [client for client in clients if client in waiting]
        if kept:
            at_once(lambda client: self._memory.put(client, round, waiting[client]), kept)
