"""What secure aggregation adds to requests: two messages in one body, and requests in waves.

A node keeps a client's secrets between two stages in Flower's context. Flower's simulation runs requests to one node in
parallel and keeps the context of the last one, so a node gets one request at a time.
"""

from collections.abc import Mapping, Sequence

from fedpara.engines.flower.rpc import size_limit
from fedpara.engines.session import Session
from fedpara.errors import WireError
from fedpara.secure.messages import STAGES

SECURE_KINDS: tuple[str, ...] = STAGES
PER_CLIENT = 1024
"""An upper bound on the bytes per client in a list of clients: its keys, or its sealed shares."""


def join_bodies(body: bytes, message: bytes) -> bytes:
    """u64 length of the first | the message of the stage | the server's model"""
    return len(body).to_bytes(8, "little") + body + message


def split_bodies(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise WireError(f"a body of {len(data)} bytes claims a first message of {size}: it is truncated.")
    return data[8 : 8 + size], data[8 + size :]


def stage_limit(session: Session, cohort: int) -> int:
    """An upper bound on the size of a client's message in any stage. A masked number takes at most eight bytes."""
    return 2 * size_limit(session.up) + PER_CLIENT * cohort


def waves(clients: Sequence[int], hosts: Mapping[int, int]) -> list[list[int]]:
    """The clients in groups, in each of which no two have the same node."""
    groups: list[list[int]] = []
    busy: list[set[int]] = []
    for client in clients:
        node = hosts.get(client, -client - 1)  # a client without a node keeps nobody waiting
        place = next((i for i, nodes in enumerate(busy) if node not in nodes), len(groups))
        if place == len(groups):
            groups.append([])
            busy.append(set())
        groups[place].append(client)
        busy[place].add(node)
    return groups
