"""Participant: a client's part of one round of secure aggregation.

    keys()                the public keys of its two secrets, and a commitment to the third
    shares(message)       neighbours' keys -> its secrets in shares, one sealed pair per neighbour
    masked(message, d)    who shared, its weight, its update -> q + masks; q is the update in fixed point, with noise
    unmask(message)       who is alive -> one share per neighbour: of b if it is alive, of its mask key if it vanished

Each stage happens once and in this order: a second answer could reveal what the first one hides. The secrets and both
messages that later stages need are the whole state, so a node can store it between two requests (`dump`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)

from fedpara.errors import WireError
from fedpara.secure import primitives as p
from fedpara.secure.distributed_noise import ClientNoise
from fedpara.secure.fixed_point import Floats, clipped, packed, quantized
from fedpara.secure.messages import STAGES, Array, Spec, Stage, distinct, numbers, read, rows, write
from fedpara.secure.settings import SMALLEST, SecAgg

SEALED = 204
"""The size in bytes of two shares with their sender and receiver, sealed by Fernet."""
PEERS: Spec = {
    "clients": (np.int64, (None,)),
    "boxes": (np.uint8, (None, p.PUBLIC)),
    "masks": (np.uint8, (None, p.PUBLIC)),
    "cohort": (np.int64, ()),
}
DELIVERED: Spec = {
    "clients": (np.int64, (None,)),
    "sealed": (np.uint8, (None, SEALED)),
    "weight": (np.float64, ()),
}
SURVIVORS: Spec = {"clients": (np.int64, (None,)), "alive": (np.bool_, (None,))}


@dataclass
class Participant:
    """A client in one round.

    Its secrets are `box` for sealed shares, `mask` for the masks shared with others, and `own` for its own mask.
    """

    how: SecAgg
    round: int
    client: int
    box: bytes
    mask: bytes
    own: bytes
    stage: int = 0
    kept: tuple[bytes, bytes] = (b"", b"")  # its own shares of `own` and `mask`
    peers: bytes = b""  # the server's message of the stage "shares"
    delivered: bytes = field(default=b"", repr=False)  # the server's message of the stage "masked"

    @classmethod
    def fresh(
        cls, how: SecAgg, round: int, client: int, secret: Callable[[str], bytes] | None = None
    ) -> "Participant":
        """A participant with secrets from the operating system, or from `secret` in a simulation."""
        make = secret or (lambda _: p.fresh_secret())
        return cls(how, round, client, make("box"), make("mask"), make("own"))

    def keys(self) -> bytes:
        self._enter("keys")
        return self._write(
            "keys",
            {
                "box": rows([p.public_key(self.box)], p.PUBLIC)[0],
                "mask": rows([p.public_key(self.mask)], p.PUBLIC)[0],
                "own": rows([p.commitment(self.own)], p.COMMITMENT)[0],
            },
        )

    def shares(self, message: bytes) -> bytes:
        self._enter("shares")
        boxes, _, _ = self._neighbours(message)
        everyone = [*boxes, self.client]
        needed = self.how.needed(len(everyone))
        pairs = zip(
            p.split_secret(self.own, needed, len(everyone)),
            p.split_secret(self.mask, needed, len(everyone)),
            strict=True,
        )
        shares = dict(zip(everyone, pairs, strict=True))
        self.kept, self.peers = shares.pop(self.client), message
        sealed = [
            p.seal(
                p.agreed_key(self.box, boxes[client]),
                share_keys_plaintext_concat(self.client, client, *pair),
            )
            for client, pair in shares.items()
        ]
        return self._write("shares", {"clients": numbers([*boxes]), "sealed": rows(sealed, SEALED)})

    def masked(
        self, message: bytes, d: Floats, rng: np.random.Generator, noise: ClientNoise | None = None
    ) -> bytes:
        """`rng` draws the rounding. It need not be secret, so it may come from the run's seed."""
        self._enter("masked")
        _, masks, cohort = self._neighbours(self.peers)
        delivered = self._read("masked", message, DELIVERED)
        sharing, weight = distinct(delivered["clients"], "the list of shares"), float(delivered["weight"])
        if not 0 < weight <= 1:
            raise WireError(f"its weight is {weight}: expected a number above 0 and at most 1.")
        if not {*sharing} <= masks.keys() or len(sharing) + 1 < self.how.needed(len(masks) + 1):
            raise WireError(
                f"{len(sharing)} of {len(masks)} neighbours shared their secrets: expected at least "
                f"{self.how.needed(len(masks) + 1) - 1}, and no other clients."
            )
        width = self.how.width(cohort, noise.scale if noise else 0.0)
        g = noise.drawn(self.how, cohort, len(d)) if noise else None
        total = quantized(clipped(d, self.how.clip), weight, self.how, width, rng, g)
        total += p.self_mask(self.own, len(d), width)
        for client in sharing:
            mask = p.pair_mask(p.agreed_key(self.mask, masks[client]), len(d), width)
            total = total + mask if self.client < client else total - mask
        self.delivered = message
        return self._write("masked", {"masked": packed(total, width)})

    def unmask(self, message: bytes) -> bytes:
        self._enter("unmask")
        boxes, _, _ = self._neighbours(self.peers)
        survivors = self._read("unmask", message, SURVIVORS)
        asked = dict(
            zip(distinct(survivors["clients"], "the list of survivors"), survivors["alive"], strict=True)
        )
        delivered = self._read("masked", self.delivered, DELIVERED)
        sealed = dict(zip(delivered["clients"].tolist(), delivered["sealed"], strict=True))
        needed = self.how.needed(len(boxes) + 1)
        if not asked.keys() <= {*sealed, self.client} or not asked.get(self.client):
            raise WireError("the list of survivors names clients that did not share, or does not name it.")
        if sum(map(bool, asked.values())) < needed:
            raise WireError(
                f"{sum(map(bool, asked.values()))} of its neighbours are alive: expected at least {needed}."
            )
        revealed = {}
        for client, alive in asked.items():
            own, mask = self.kept if client == self.client else self._opened(client, boxes, sealed[client])
            if share := own if alive else mask:
                revealed[client] = share
        return self._write(
            "unmask", {"clients": numbers([*revealed]), "shares": rows([*revealed.values()], p.SHARE)}
        )

    def dump(self) -> bytes:
        """The state between two stages, for `restore`. It contains the secrets, so it must stay on the client."""
        parts = (self.box, self.mask, self.own, *self.kept, self.peers, self.delivered)
        return b"".join(len(part).to_bytes(4, "little") + part for part in (bytes([self.stage]), *parts))

    @classmethod
    def restore(cls, how: SecAgg, round: int, client: int, dumped: bytes) -> "Participant":
        parts = []
        while dumped:
            size = int.from_bytes(dumped[:4], "little")
            parts.append(dumped[4 : 4 + size])
            dumped = dumped[4 + size :]
        stage, box, mask, own, own_share, mask_share, peers, delivered = parts
        return cls(how, round, client, box, mask, own, stage[0], (own_share, mask_share), peers, delivered)

    def _opened(self, client: int, boxes: dict[int, bytes], sealed: Array) -> tuple[bytes, bytes]:
        """The client's two shares; empty if they cannot be opened, so that one bad client does not stop the others."""
        try:
            text = p.unseal(p.agreed_key(self.box, boxes[client]), sealed.tobytes())
        except WireError:
            return b"", b""
        sender, receiver, own, mask = share_keys_plaintext_separate(text)
        fits = (sender, receiver, len(own), len(mask)) == (client, self.client, p.SHARE, p.SHARE)
        return (own, mask) if fits else (b"", b"")

    def _neighbours(self, message: bytes) -> tuple[dict[int, bytes], dict[int, bytes], int]:
        """(the public keys of their boxes, of their masks, the size of the cohort)"""
        peers = self._read("shares", message, PEERS)
        clients, cohort = distinct(peers["clients"], "the list of neighbours"), int(peers["cohort"])
        if self.client in clients or not SMALLEST <= len(clients) + 1 <= cohort:
            raise WireError(
                f"{len(clients)} neighbours in a cohort of {cohort}: expected at least {SMALLEST - 1} other clients."
            )
        boxes, masks = ([row.tobytes() for row in peers[name]] for name in ("boxes", "masks"))
        if len({*boxes, *masks}) < 2 * len(clients):
            raise WireError("two neighbours have the same key.")
        return dict(zip(clients, boxes, strict=True)), dict(zip(clients, masks, strict=True)), cohort

    def _enter(self, stage: Stage) -> None:
        if self.stage >= len(STAGES) or STAGES[self.stage] != stage:
            after = STAGES[self.stage - 1] if self.stage else "nothing"
            raise WireError(
                f"stage {stage!r} after {after!r} in round {self.round}: each stage happens once."
            )
        self.stage += 1

    def _read(self, stage: Stage, message: bytes, spec: Spec) -> dict[str, Array]:
        return read(message, stage, self.round, "server", spec)

    def _write(self, stage: Stage, arrays: dict[str, Array]) -> bytes:
        return write(stage, self.round, f"client:{self.client}", arrays)
