"""What clients keep between rounds: private parameters and control variates."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from fedpara.algorithms import Variables
from fedpara.engines.threads import at_once
from fedpara.state import clone, nbytes


class ClientMemory(Protocol):
    """Several threads call it at once, each for another client."""

    def get(self, client: int) -> Variables | None: ...

    def put(self, client: int, round: int, groups: Variables) -> None: ...


@runtime_checkable
class StagedMemory(ClientMemory, Protocol):
    """Stores a round's results before they count: `adopt` makes them the client's, `drop` removes them."""

    def stage(self, client: int, round: int, groups: Variables) -> None: ...

    def adopt(self, client: int, round: int) -> None: ...

    def drop(self, client: int, round: int) -> None: ...


class InMemory:
    """Keeps memories in this process. Only clients that have taken part use space."""

    def __init__(self) -> None:
        self._groups: dict[int, Variables] = {}

    def get(self, client: int) -> Variables | None:
        return self._groups.get(client)

    def put(self, client: int, round: int, groups: Variables) -> None:
        """Copies: the given tensors may be views into a whole cohort's memory."""
        self._groups[client] = {name: clone(state) for name, state in groups.items()}

    def __len__(self) -> int:
        return len(self._groups)


MOST_READ = 1 << 30
"""A cohort's memories are read ahead and held during the round if they take at most this many bytes."""
MOST_WAITING = 64 << 20
"""Bytes that wait in RAM for the server's decision; beyond that, a memory on disk stages them."""


class PendingMemory:
    """Holds a round's new memories until the server has decided which updates it accepts.

    Clients whose updates were refused keep their old memories: otherwise the server's control variate would no longer
    be the mean of the clients'. A `StagedMemory` (on disk) takes in the new ones early, so that a large cohort need
    not fit into RAM.
    """

    def __init__(self, memory: ClientMemory) -> None:
        self._memory = memory
        self._waiting: dict[int, Variables] = {}
        self._bytes = 0
        self._staged: set[int] = set()

    def get(self, client: int) -> Variables | None:
        return self._memory.get(client)

    def get_all(self, clients: Sequence[int]) -> list[Variables | None]:
        return at_once(self._memory.get, clients)

    def hold(self, client: int, round: int, groups: Variables) -> None:
        if not any(groups.values()):  # most algorithms have no client variables
            return
        self._waiting[client] = groups
        self._bytes += sum(map(nbytes, groups.values()))
        if self._bytes > MOST_WAITING and isinstance(self._memory, StagedMemory):
            stage = self._memory.stage
            at_once(lambda one: stage(one, round, self._waiting[one]), self._waiting)
            self._staged |= self._waiting.keys()
            self._waiting, self._bytes = {}, 0

    def commit(self, round: int, clients: Sequence[int]) -> None:
        """The new memories of these clients count; all others are dropped."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        staged, self._staged = self._staged, set()
        kept = [client for client in clients if client in waiting]
        if kept:
            at_once(lambda client: self._memory.put(client, round, waiting[client]), kept)
        if staged and isinstance(self._memory, StagedMemory):
            accepted = set(clients)
            for client in staged:
                (self._memory.adopt if client in accepted else self._memory.drop)(client, round)


class ClientParts:
    """The memories of a round's clients as it begins: read ahead if they are small, otherwise on demand."""

    def __init__(self, memory: PendingMemory, clients: Sequence[int], first: Callable[[], Variables]) -> None:
        self._memory, self._first = memory, first
        size = sum(map(nbytes, first().values()))
        self._read: dict[int, Variables] = {}
        if 0 < size * len(clients) <= MOST_READ:
            self._read = dict(zip(clients, self.of(clients), strict=True))
        self._nothing = None if size else first()

    def of(self, clients: Sequence[int]) -> list[Variables]:
        missing = [client for client in clients if client not in self._read]
        got = dict(zip(missing, self._memory.get_all(missing), strict=True)) if missing else {}
        return [self._read.get(client) or got.get(client) or self._first() for client in clients]

    def __getitem__(self, client: int) -> Variables:
        return self._nothing or self.of([client])[0]
