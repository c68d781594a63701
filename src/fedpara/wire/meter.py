"""How much travelled, from the messages themselves, and what that costs.

t = t_comp + t_comm,  t_comm = bytes both ways / network speed        (appendix D.1, "Training time")
E = bits * joules per bit                                             (Figure 3g)
"""

from collections.abc import Iterable, Sized
from dataclasses import dataclass

from fedpara.errors import UsageError

PAPER_MEGA = float(2**20)
JOULES_PER_BIT = 2.87e-6


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
    """Counts encoded bytes, by round, and by client in the current round only: the memory of a round is a
    handful of numbers and its cohort, whatever the size of the federation. `Meter(rounds)` goes on from them.
    """

    def __init__(self, rounds: Iterable[RoundTraffic] = ()) -> None:
        self.rounds = list(rounds)
        self.by_client: dict[int, Traffic] = {}

    def down(self, round: int, client: int, message: Sized) -> None:
        """Server to client."""
        self._client(round, client).down += len(message)
        self._add(down=len(message))

    def up(self, round: int, client: int, message: Sized | int) -> None:
        """Client to server; the bytes alone, where they were no message."""
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
                f"a message of round {round} in round {self.rounds[-1].round}: expected rounds in order."
            )
        return self.by_client.setdefault(client, Traffic())

    def _add(self, up: int = 0, down: int = 0) -> None:
        last = self.rounds[-1]
        self.rounds[-1] = RoundTraffic(last.round, last.up + up, last.down + down, len(self.by_client))


def communication_seconds(bytes_: int, mbps: float, mega: float = 1e6) -> float:
    """t_comm of `bytes_` (both ways together) at `mbps` megabits a second.

    A megabit is 10^6 bits. The paper's table divides sizes in MiB by Mbps / 8, which is a megabit of 2^20:
    mega=PAPER_MEGA repeats it. With 1,545,442 float32 parameters that gives 47.16, 9.43 and 1.89 s at 2, 10
    and 50 Mbps (printed: 47.2, 9.44, 1.88); with 15,253,578 it gives 465.5, 93.10 and 18.62 s (printed:
    470.2, 94.04, 18.61). The first two of those do not agree with the third, nor 94.04 with its own total,
    94.68 s less 1.64 s of computing: 93.04. Megabits of 10^6 would give 488.1, 97.62 and 19.52 s.
    """
    if not mbps > 0:
        raise UsageError(f"a network of {mbps} Mbps: expected a positive speed.")
    return 8 * bytes_ / (mbps * mega)


def round_seconds(compute: float, bytes_: int, mbps: float, mega: float = 1e6) -> float:
    """t = t_comp + t_comm"""
    return compute + communication_seconds(bytes_, mbps, mega)


def energy_joules(bytes_: int, joules_per_bit: float = JOULES_PER_BIT) -> float:
    """E of `bytes_` from user to data center and back.

    The default, 2.87 microjoules a bit, is read off the paper's Figure 3(g), which labels twelve bars with GB
    and MJ by the user-to-data-center model of Yan et al. (Energies 12(1):184, 2019) and does not state its
    constant. Together the twelve admit only 24.59 to 24.73 kJ a GB, and GB there is 2^30 bytes (CIFAR-10 IID,
    gamma 0.1: 110 rounds x 16 clients x 2 x 1,545,442 x 4 bytes = 20.27 GiB, printed 20.3): 2.863 to 2.879.
    That model is of phones on LTE; give your own network's figure for anything else.
    """
    if joules_per_bit < 0:
        raise UsageError(f"{joules_per_bit} joules a bit: expected 0 or more.")
    return 8 * bytes_ * joules_per_bit
