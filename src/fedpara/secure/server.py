"""Aggregation: the server's part of one round of secure aggregation.

    receive_keys      clients' keys             -> each one's neighbours with their keys
    receive_shares    sealed shares             -> each one's mail, and its weight
    receive_masked    masked vectors            -> who is alive, who vanished
    receive_unmask    shares of their secrets   -> the sum of the updates

Each takes the messages of the clients that answered. The others have vanished: a client that vanishes before `masked`
leaves masks in the vectors of its neighbours, which the shares of its key remove. `Skipped` if too few are left.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice

import numpy as np

from fedpara.errors import WireError
from fedpara.secure import primitives as p
from fedpara.secure.client import SEALED
from fedpara.secure.fixed_point import Floats, Ring, restored, ring_type, unpacked
from fedpara.secure.messages import Array, Spec, Stage, distinct, numbers, read, rows, write
from fedpara.secure.settings import SMALLEST, SecAgg

TRIES = 20
"""How many sets of shares to try for a secret. One bad share is in few of them."""
RARE = 8.0
"""The norm of n standard Gaussian numbers is above sqrt(n) + 8 with a probability below 1e-13."""
KEYS: Spec = {
    "box": (np.uint8, (p.PUBLIC,)),
    "mask": (np.uint8, (p.PUBLIC,)),
    "own": (np.uint8, (p.COMMITMENT,)),
}
SHARES: Spec = {"clients": (np.int64, (None,)), "sealed": (np.uint8, (None, SEALED))}
REVEALED: Spec = {"clients": (np.int64, (None,)), "shares": (np.uint8, (None, p.SHARE))}


class Skipped(Exception):
    """The round has no sum: too few clients are left, or what they sent does not fit together."""


@dataclass
class Aggregation:
    """`length` is the number of values of an update. `refused` says which messages were invalid, and why."""

    how: SecAgg
    round: int
    cohort: Sequence[int]
    length: int
    seed: int = 0  # of the neighbours
    noise: float = (
        0.0  # standard deviation of the noise in the sum if only the minimum number of clients stays
    )
    refused: dict[int, str] = field(default_factory=dict)
    neighbours: dict[int, list[int]] = field(default_factory=dict)
    arrived: list[int] = field(default_factory=list)
    _keys: dict[int, dict[str, bytes]] = field(default_factory=dict)
    _sharing: dict[int, list[int]] = field(default_factory=dict)  # neighbours whose shares each one got
    _weights: dict[int, float] = field(default_factory=dict)
    _total: Ring = field(default_factory=lambda: np.zeros(0, np.uint32))

    @property
    def width(self) -> int:
        return self.how.width(len(self.cohort), self.noise)

    def receive_keys(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        for client, message in messages.items():
            if (got := self._read("keys", client, message, KEYS)) is not None:
                self._keys[client] = {name: array.tobytes() for name, array in got.items()}
        for client, why in _unusable(self._keys).items():
            del self._keys[client]
            self.refused[client] = why
        present = sorted(self._keys)
        self._expect(present, "sent their keys")
        self.neighbours = circle(present, self.how.neighbours, (self.seed, self.round))
        asked = {}
        for client, others in self.neighbours.items():
            boxes, masks = ([self._keys[other][name] for other in others] for name in ("box", "mask"))
            asked[client] = self._write(
                "shares",
                {
                    "clients": numbers(others),
                    "boxes": rows(boxes, p.PUBLIC),
                    "masks": rows(masks, p.PUBLIC),
                    "cohort": np.array(len(self.cohort), np.int64),
                },
            )
        return asked

    def receive_shares(self, messages: Mapping[int, bytes], weights: Mapping[int, float]) -> dict[int, bytes]:
        """`weights` are the clients' weights in the sum, at most 1; a client without a weight leaves the round."""
        mail: dict[int, dict[int, bytes]] = {}
        for client, message in messages.items():
            got = self._read("shares", client, message, SHARES)
            if got is None:
                continue
            if got["clients"].tolist() != self.neighbours[client]:
                self.refused[client] = "it shares its secrets with other clients than its neighbours"
            elif not weights.get(client):
                self.refused[client] = "it holds no examples"
            else:
                boxes = (row.tobytes() for row in got["sealed"])
                mail[client] = dict(zip(self.neighbours[client], boxes, strict=True))
        self._expect(list(mail), "shared their secrets")
        while alone := [client for client in mail if not self._enough(client, mail)]:
            for client in alone:  # its secrets could not be restored
                del mail[client]
                self.refused.setdefault(client, "too few of its neighbours shared their secrets")
        self._expect(list(mail), "have enough neighbours that shared")
        self._weights = {client: weights[client] for client in mail}
        self._sharing = {
            client: [other for other in self.neighbours[client] if other in mail] for client in mail
        }
        return {
            client: self._write(
                "masked",
                {
                    "clients": numbers(others),
                    "sealed": rows([mail[other][client] for other in others], SEALED),
                    "weight": np.array(weights[client]),
                },
            )
            for client, others in self._sharing.items()
        }

    def receive_masked(self, messages: Iterable[tuple[int, bytes]]) -> dict[int, bytes]:
        """Adds each vector as it arrives."""
        width, spec = self.width, {"masked": (np.uint8, (self.length, self.width))}
        self._total = np.zeros(self.length, ring_type(width))
        for client, message in messages:
            if (got := self._read("masked", client, message, spec)) is not None:
                self._total += unpacked(got["masked"], width)  # type: ignore[arg-type]
                self.arrived.append(client)
        self._expect(self.arrived, "sent their masked update")
        alive = {*self.arrived}
        return {
            client: self._write(
                "unmask",
                {
                    "clients": numbers([client, *self._sharing[client]]),
                    "alive": np.array([c in alive for c in (client, *self._sharing[client])]),
                },
            )
            for client in self.arrived
        }

    def receive_unmask(self, messages: Mapping[int, bytes]) -> tuple[Floats, float]:
        """(sum_i a_i d_i over the clients that arrived, sum_i a_i)"""
        shares: dict[int, list[bytes]] = {}
        for client, message in messages.items():
            got = self._read("unmask", client, message, REVEALED)
            if got is None:
                continue
            asked = {client, *self._sharing[client]}
            for other, share in zip(got["clients"].tolist(), got["shares"], strict=True):
                if other in asked:
                    shares.setdefault(other, []).append(share.tobytes())
        self._expect([client for client in messages if client not in self.refused], "helped to unmask")
        alive = {*self.arrived}
        for client in alive:
            secret = self._restored(client, shares.get(client, []), "own")
            self._total -= p.self_mask(secret, self.length, self.width)
        for client in self._sharing.keys() - alive:
            if left := [other for other in self._sharing[client] if other in alive]:
                secret = self._restored(client, shares.get(client, []), "mask")
                self._unmask(client, secret, left)
        weight = sum(self._weights[client] for client in sorted(alive))
        total, largest = restored(self._total, self.how, self.width)
        self._check(total, largest, weight)
        return total, weight

    def _unmask(self, vanished: int, secret: bytes, left: Sequence[int]) -> None:
        """Removes the masks that its neighbours share with a client that vanished."""
        for other in left:
            key = p.agreed_key(secret, self._keys[other]["mask"])
            mask = p.pair_mask(key, self.length, self.width)
            self._total = self._total - mask if other < vanished else self._total + mask

    def _restored(self, client: int, shares: Sequence[bytes], which: str) -> bytes:
        needed = self._needed(client)
        for some in islice(combinations(shares, needed), TRIES):
            try:
                secret = p.join_shares(some)
            except WireError:
                continue
            made = p.commitment(secret) if which == "own" else _public(secret)
            if made == self._keys[client][which]:
                return secret
        raise Skipped(
            f"the masks of client {client} cannot be removed: {len(shares)} shares arrived, and {needed} that fit "
            "together are needed"
        )

    def _check(self, total: Floats, largest: int, weight: float) -> None:
        """Skipped if the sum is larger than clipped updates allow: some client did not clip."""
        count, share = len(self.arrived), self.how.share(self.noise, len(self.cohort))
        if largest > count * self.how.largest(share):
            raise Skipped(f"a number of the sum is out of the range that {count} clients can reach")
        slack = self.how.step * count * self.length**0.5  # of the rounding
        slack += share * count**0.5 * (self.length**0.5 + RARE)  # of the noise
        norm, most = float(np.linalg.norm(total)), weight * self.how.clip + slack
        if not norm <= most:
            raise Skipped(f"the norm of the sum is {norm:.6g}: expected at most {most:.6g}")

    def _needed(self, client: int) -> int:
        return self.how.needed(len(self.neighbours[client]) + 1)

    def _enough(self, client: int, mail: Mapping[int, object]) -> bool:
        there = sum(other in mail for other in self.neighbours[client]) + 1
        return there >= max(self._needed(client), 2)

    def _expect(self, clients: Sequence[int], what: str) -> None:
        needed = max(self.how.needed(len(self.cohort)), 2)
        if len(self.cohort) < SMALLEST:
            raise Skipped(
                f"{len(self.cohort)} clients are too few for secure aggregation: expected {SMALLEST} or more"
            )
        if len(clients) < needed:
            raise Skipped(
                f"{len(clients)} of {len(self.cohort)} clients {what}: expected at least {needed} (threshold "
                f"{self.how.threshold:g})"
            )

    def _read(self, stage: Stage, client: int, message: bytes, spec: Spec) -> dict[str, Array] | None:
        try:
            got = read(message, stage, self.round, f"client:{client}", spec)
            if "clients" in got:
                distinct(got["clients"], "its message")
        except WireError as error:
            self.refused[client] = str(error)
            return None
        return got

    def _write(self, stage: Stage, arrays: dict[str, Array]) -> bytes:
        return write(stage, self.round, "server", arrays)


def circle(clients: Sequence[int], neighbours: int | None, seed: tuple[int, int]) -> dict[int, list[int]]:
    """Each client's neighbours: the nearest ones on a circle in random order; all others if `neighbours` is None."""
    count = len(clients)
    if neighbours is None or neighbours >= count - 1:
        return {client: [other for other in clients if other != client] for client in clients}
    order = [clients[i] for i in np.random.default_rng(seed).permutation(count)]
    half = -(-neighbours // 2)
    beside = [*range(-half, 0), *range(1, half + 1)]
    near = {order[i]: {order[(i + step) % count] for step in beside} - {order[i]} for i in range(count)}
    return {client: sorted(near[client]) for client in clients}


def _unusable(keys: Mapping[int, Mapping[str, bytes]]) -> dict[int, str]:
    """The clients whose public keys their neighbours would refuse, and why."""
    public = {client: (own["box"], own["mask"]) for client, own in keys.items()}
    count = Counter(key for both in public.values() for key in both)
    found = {}
    for client, both in public.items():
        if not all(map(p.is_public_key, both)):
            found[client] = "one of its public keys is not a point of the curve P-256"
        elif any(count[key] > 1 for key in both):
            found[client] = "one of its public keys occurs twice"
    return found


def _public(secret: bytes) -> bytes:
    return p.public_key(secret) if len(secret) == p.SECRET else b""
