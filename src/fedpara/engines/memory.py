"""What clients keep from round to round: private parameters, control variates. Made at a client's first round."""

from typing import Protocol

from fedpara.algorithms import Groups


class ClientMemory(Protocol):
    def get(self, client: int) -> Groups | None: ...

    def put(self, client: int, round: int, groups: Groups) -> None: ...


class InMemory:
    """In this process, by client: only those that have taken part cost anything."""

    def __init__(self) -> None:
        self._groups: dict[int, Groups] = {}

    def get(self, client: int) -> Groups | None:
        return self._groups.get(client)

    def put(self, client: int, round: int, groups: Groups) -> None:
        if any(groups.values()):
            self._groups[client] = groups

    def __len__(self) -> int:
        return len(self._groups)
