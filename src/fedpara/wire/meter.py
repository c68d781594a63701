"""Traffic, counted from the encoded messages."""

from collections.abc import Iterable, Sized
from dataclasses import dataclass

from fedpara.errors import UsageError


@dataclass(frozen=True)
class RoundTraffic:
    round: int
    up: int = 0
    down: int = 0
    clients: int = 0


@dataclass
class Traffic:
    up: int = 0
    down: int = 0


class Meter:
    """Counts encoded bytes per round, and per client in the current round only.

    Its memory does not grow with the federation. `Meter(rounds)` continues from earlier rounds.
    """

    def __init__(self, rounds: Iterable[RoundTraffic] = ()) -> None:
        self.rounds = list(rounds)
        self.by_client: dict[int, Traffic] = {}

    def down(self, round: int, client: int, message: Sized | int) -> None:
        """Server to client: a message, or the number of bytes of several."""
        size = message if isinstance(message, int) else len(message)
        self._client(round, client).down += size
        self._add(down=size)

    def up(self, round: int, client: int, message: Sized | int) -> None:
        """Client to server: a message, or the number of bytes of an invalid one."""
        size = message if isinstance(message, int) else len(message)
        self._client(round, client).up += size
        self._add(up=size)

    @property
    def total_up(self) -> int:
        return sum(traffic.up for traffic in self.rounds)

    @property
    def total_down(self) -> int:
        return sum(traffic.down for traffic in self.rounds)

    @property
    def total(self) -> int:
        return self.total_up + self.total_down

    def _client(self, round: int, client: int) -> Traffic:
        if not self.rounds or round > self.rounds[-1].round:
            self.rounds.append(RoundTraffic(round))
            self.by_client = {}
        elif round < self.rounds[-1].round:
            raise UsageError(
                f"a message of round {round} in round {self.rounds[-1].round}: expected rounds in ascending order."
            )
        return self.by_client.setdefault(client, Traffic())

    def _add(self, up: int = 0, down: int = 0) -> None:
        last = self.rounds[-1]
        self.rounds[-1] = RoundTraffic(last.round, last.up + up, last.down + down, len(self.by_client))
