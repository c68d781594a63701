"""What clients keep from round to round: private parameters, control variates. Made at a client's first round."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from fedpara.algorithms import Variables
from fedpara.engines.threads import at_once
from fedpara.state import clone, nbytes


class ClientMemory(Protocol):
    """Asked from several threads at once, for a client each."""

    def get(self, client: int) -> Variables | None: ...

    def put(self, client: int, round: int, groups: Variables) -> None: ...


@runtime_checkable
class StagedMemory(ClientMemory, Protocol):
    """One that can take in what a round made before it counts: `adopt` makes it the client's, `drop` removes it."""

    def stage(self, client: int, round: int, groups: Variables) -> None: ...

    def adopt(self, client: int, round: int) -> None: ...

    def drop(self, client: int, round: int) -> None: ...


class InMemory:
    """In this process, by client: only those that have taken part cost anything."""

    def __init__(self) -> None:
        self._groups: dict[int, Variables] = {}

    def get(self, client: int) -> Variables | None:
        return self._groups.get(client)

    def put(self, client: int, round: int, groups: Variables) -> None:
        """Copied: what an engine hands over may be a sliver of its whole cohort's memory."""
        self._groups[client] = {name: clone(state) for name, state in groups.items()}

    def __len__(self) -> int:
        return len(self._groups)


MOST_READ = 1 << 30
"""Bytes of a cohort's own parts that are read before a round and held to its end."""
MOST_WAITING = 64 << 20
"""Bytes that may wait in RAM for the server's word; beyond that, a memory on disk takes them in early."""


class PendingMemory:
    """A memory whose newest round waits for the server's word.

    Only clients whose updates were taken keep what the round made of them: a control variate that moved without the
    server's would no longer be a part of its mean. A memory with `stage` and `drop` (one on disk) takes in what a
    round made before the server has spoken, so that a large cohort need not fit into RAM.
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
        if not any(groups.values()):  # most methods keep nothing
            return
        self._waiting[client] = groups
        self._bytes += sum(map(nbytes, groups.values()))
        if self._bytes > MOST_WAITING and isinstance(self._memory, StagedMemory):
            stage = self._memory.stage
            at_once(lambda one: stage(one, round, self._waiting[one]), self._waiting)
            self._staged |= self._waiting.keys()
            self._waiting, self._bytes = {}, 0

    def commit(self, round: int, clients: Sequence[int]) -> None:
        """What these clients hold is theirs; what any other holds is dropped."""
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
    """What a round's clients hold as it begins: read at once where that is little, else each time it is asked for."""

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
