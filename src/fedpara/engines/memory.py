"""What clients keep between rounds: private parameters, control variates, optimizer slots, personal models."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch

from fedpara.algorithms import Variables
from fedpara.engines.threads import map_in_threads
from fedpara.engines.transfer import HOST, move_variables
from fedpara.layout import joined, separated
from fedpara.state import State, nbytes

Result = TypeVar("Result")


class ClientMemory(Protocol):
    """Stores what clients keep between rounds. Threads may call it in parallel for different clients."""

    def get(self, client: int) -> Variables | None: ...

    def put(self, client: int, round: int, variables: Variables) -> None: ...


@runtime_checkable
class StagedMemory(ClientMemory, Protocol):
    """Stores a round's results before they count: `adopt` makes them the client's, `drop` removes them."""

    def stage(self, client: int, round: int, variables: Variables) -> None: ...

    def adopt(self, client: int, round: int) -> None: ...

    def drop(self, client: int, round: int) -> None: ...


class InMemory:
    """Keeps memories in this process. Only clients that have taken part use space."""

    def __init__(self) -> None:
        self._memories: dict[int, Variables] = {}

    def get(self, client: int) -> Variables | None:
        return self._memories.get(client)

    def put(self, client: int, round: int, variables: Variables) -> None:
        """Copies views of a cohort's memory, because a view would keep all of it allocated."""
        self._memories[client] = {name: _in_one_piece(state) for name, state in variables.items()}

    def __len__(self) -> int:
        return len(self._memories)


def _in_one_piece(state: State) -> State:
    """The state in its own memory, one block per type, so that its tensors move to a device together.

    Pinned memory is copied too, because the system has little of it.
    """
    blocks = {
        kind: whole.clone() if whole.untyped_storage().nbytes() > whole.nbytes or whole.is_pinned() else whole
        for kind, whole in joined(state).items()
    }
    return separated(blocks, state)


MAX_READ_AHEAD = 1 << 30
"""A cohort's memories are read ahead and held during the round if they take at most this many bytes."""
MAX_WAITING = 64 << 20
"""New memories wait in RAM for the server's decision up to this many bytes; above it, a memory on disk stages them."""


class PendingMemory:
    """Holds a round's new memories until the server has decided which updates it accepts.

    Clients whose updates were refused keep their old memories: otherwise the server's control variate would no longer
    equal the mean of the clients' variates. A `StagedMemory` (on disk) stores the new ones early, so that a large
    cohort need not fit into RAM.
    """

    def __init__(self, memory: ClientMemory) -> None:
        self._memory = memory
        self._waiting: dict[int, Variables] = {}
        self._bytes = 0
        self._staged: set[int] = set()

    def get(self, client: int) -> Variables | None:
        return self._memory.get(client)

    def get_all(self, clients: Sequence[int]) -> list[Variables | None]:
        return self._for_each(self._memory.get, clients)

    def _for_each(self, work: Callable[[int], Result], clients: Sequence[int]) -> list[Result]:
        """Threads wait for the disk side by side; in RAM there is nothing to wait for."""
        if isinstance(self._memory, StagedMemory):
            return map_in_threads(work, clients)
        return [work(client) for client in clients]

    def hold(self, client: int, round: int, variables: Variables) -> None:
        if not any(variables.values()):  # most algorithms have no client variables
            return
        self._waiting[client] = variables
        self._bytes += sum(map(nbytes, variables.values()))
        if self._bytes > MAX_WAITING and isinstance(self._memory, StagedMemory):
            stage = self._memory.stage
            map_in_threads(lambda one: stage(one, round, self._waiting[one]), self._waiting)
            self._staged |= self._waiting.keys()
            self._waiting, self._bytes = {}, 0

    def commit(self, round: int, clients: Sequence[int]) -> None:
        """Stores the new memories of these clients and drops all others."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        staged, self._staged = self._staged, set()
        chosen = [client for client in clients if client in waiting]
        if chosen:
            self._for_each(lambda client: self._memory.put(client, round, waiting[client]), chosen)
        if staged and isinstance(self._memory, StagedMemory):
            accepted = set(clients)
            for client in staged:
                (self._memory.adopt if client in accepted else self._memory.drop)(client, round)


class CohortMemories:
    """The memories of a round's clients at its start: read ahead if they are small, otherwise on demand.

    They are on `device`, where the clients' replies are made.
    """

    def __init__(
        self,
        memory: PendingMemory,
        clients: Sequence[int],
        first: Callable[[], Variables],
        device: torch.device = HOST,
    ) -> None:
        self._memory, self._first, self._device = memory, first, device
        size = sum(map(nbytes, first().values()))
        self._read: dict[int, Variables] = {}
        if 0 < size * len(clients) <= MAX_READ_AHEAD:
            self._read = dict(zip(clients, self.of(clients), strict=True))
        self._empty = None if size else first()

    @property
    def are_empty(self) -> bool:
        """Whether clients keep nothing."""
        return self._empty is not None

    def of(self, clients: Sequence[int]) -> list[Variables]:
        """One memory per client; a client without one gets the initial memory."""
        missing = [client for client in clients if client not in self._read]
        got = dict(zip(missing, self._memory.get_all(missing), strict=True)) if missing else {}
        found = ((client, self._read.get(client)) for client in clients)
        return [
            move_variables(got.get(client) or self._first(), self._device) if read is None else read
            for client, read in found
        ]

    def leave_device(self) -> None:
        """Moves the memories to the host, because the device is out of memory."""
        self._device = HOST
        self._read = {client: move_variables(memory, HOST) for client, memory in self._read.items()}

    def __getitem__(self, client: int) -> Variables:
        return self._empty or self.of([client])[0]
