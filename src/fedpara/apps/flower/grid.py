"""Packets over Flower's Grid. Only this module knows Flower's message types.

A packet becomes a ConfigRecord of its facts and an ArrayRecord of one array, which holds fedpara's encoded bytes. So
fedpara checks the bytes before anything parses them.
"""

from collections.abc import Collection, Mapping, Sequence

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedpara.engines.flower.rpc import Fact, Packet
from fedpara.engines.flower.secure import SECURE_KINDS

FACTS, BODY, STYPE = "facts", "body", "fedpara"
KINDS = {"hello": MessageType.QUERY, "train": MessageType.TRAIN, "score": MessageType.EVALUATE}
KINDS |= dict.fromkeys(SECURE_KINDS, MessageType.TRAIN)
TRAVEL = 30.0
"""Seconds beyond the deadline before Flower drops a message, so that late responses can be logged."""


def to_records(packet: Packet) -> RecordDict:
    records = RecordDict({FACTS: ConfigRecord(dict(packet.facts))})
    if packet.body:
        array = Array("uint8", (len(packet.body),), STYPE, packet.body)
        records[BODY] = ArrayRecord({BODY: array})
    return records


def from_records(records: RecordDict) -> Packet | str:
    """The packet, or the reason why the records are not one."""
    facts = records.get(FACTS)
    if not set(records) <= {FACTS, BODY} or not isinstance(facts, ConfigRecord):
        return f"its records are {', '.join(sorted(map(str, records)))[:200] or 'none'}: expected {FACTS} and {BODY}"
    body = b""
    if BODY in records:
        arrays = records[BODY]
        if not isinstance(arrays, ArrayRecord) or list(arrays) != [BODY] or arrays[BODY].stype != STYPE:
            return f"its {BODY} is not one array of fedpara's own bytes"
        body = arrays[BODY].data
    return Packet({name: value for name, value in facts.items() if isinstance(value, Fact)}, body)


class GridTransport:
    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> Mapping[int, bytes]:
        """The connected nodes' public keys. The SuperLink has verified that each node holds the private key."""
        return {int(node.node_id): bytes(node.public_key) for node in self._grid.get_nodes()}

    def send(self, packets: Sequence[tuple[int, Packet]], seconds: float) -> list[str]:
        return [self._send(node, packet, seconds) for node, packet in packets]

    def collect(self, names: Collection[str]) -> dict[str, Packet | str]:
        try:
            return self._pull(names)
        except httpx.HTTPError:
            raise  # the failure is in the SuperLink
        except Exception as error:
            # One reply that Flower cannot read must not lose the others.
            if len(names) == 1:
                return {next(iter(names)): f"Flower cannot read it: {type(error).__name__}: {error}"}
        got: dict[str, Packet | str] = {}
        for name in names:
            got |= self.collect([name])
        return got

    def _pull(self, names: Collection[str]) -> dict[str, Packet | str]:
        got: dict[str, Packet | str] = {}
        for message in self._grid.pull_messages(list(names)):
            if message.has_error():
                response: Packet | str = f"Flower reports error {message.error.code}: {message.error.reason}"
            else:
                response = from_records(message.content)
            got[message.metadata.reply_to_message_id] = response
        return got

    def _send(self, node: int, packet: Packet, seconds: float) -> str:
        message = Message(
            to_records(packet),
            node,
            KINDS[str(packet.facts["kind"])],
            ttl=seconds + TRAVEL,
            group_id=str(packet.facts["round"]),
        )
        # One per call: Flower drops messages it could not send, and the ids would no longer match the packets.
        names = [name for name in self._grid.push_messages([message]) if name]
        return names[0] if names else ""
