"""Packets over Flower's Grid, and records that are not packets."""

import pytest

flwr = pytest.importorskip("flwr.app", reason="Flower is not installed: pip install '.[flower]'")

from fedpara.apps.flower.grid import GridTransport, from_records, to_records  # noqa: E402
from fedpara.engines.flower.rpc import Packet  # noqa: E402


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 50_000])
def test_a_packet_round_trip(body):
    packet = Packet({"kind": "train", "round": 3, "seconds": 1.5, "personal": True}, body)
    assert from_records(to_records(packet)) == packet


def test_the_bytes_are_sent_unchanged():
    array = to_records(Packet({}, b"message"))["body"]["body"]
    assert (array.data, array.stype, array.shape) == (b"message", "fedpara", (7,))


def arrays(**named):
    return flwr.ArrayRecord(named)


OURS = flwr.Array("uint8", (1,), "fedpara", b"x")


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ({}, "its records are none"),
        ({"facts": flwr.MetricRecord({"a": 1})}, "its records are facts"),
        ({"facts": flwr.ConfigRecord(), "more": flwr.ConfigRecord()}, "its records are facts, more"),
        ({"facts": flwr.ConfigRecord(), "body": flwr.ConfigRecord()}, "not one array"),
        ({"facts": flwr.ConfigRecord(), "body": arrays(body=OURS, other=OURS)}, "not one array"),
        ({"facts": flwr.ConfigRecord(), "body": arrays(other=OURS)}, "not one array"),
        (
            {
                "facts": flwr.ConfigRecord(),
                "body": arrays(body=flwr.Array("float32", (10**13,), "numpy.ndarray", b"")),
            },
            "not one array of fedpara's own bytes",
        ),
    ],
)
def test_other_records_are_rejected_unread(records, says):
    assert says in from_records(flwr.RecordDict(records))


def test_facts_of_other_types_are_dropped():
    records = flwr.RecordDict({"facts": flwr.ConfigRecord({"a": [1, 2], "b": b"x", "c": 3})})
    assert from_records(records) == Packet({"c": 3})


class Connected:
    def get_nodes(self):
        from flwr.proto.node_pb2 import NodeInfo

        return [NodeInfo(node_id=7, public_key=b"a key"), NodeInfo(node_id=8)]


def test_nodes_come_with_their_keys():
    assert GridTransport(Connected()).nodes() == {7: b"a key", 8: b""}


class Broken:
    """A grid that raises whenever the reply `bad` is requested."""

    def pull_messages(self, pending):
        if "bad" in pending:
            raise ValueError("a broken object")
        return []


def test_an_unreadable_reply_does_not_lose_the_others():
    got = GridTransport(Broken()).collect(["one", "bad", "two"])
    assert got == {"bad": "Flower cannot read it: ValueError: a broken object"}
