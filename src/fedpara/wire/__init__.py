"""Messages: their encoding and contents, the checks on arrival, and the traffic."""

from fedpara.wire.check import admit, spec_of
from fedpara.wire.codec import AnyMessage, Header, Message, decode, encode, make_message, split_messages
from fedpara.wire.coded import Spec
from fedpara.wire.cost import (
    JOULES_PER_BIT,
    PAPER_MEGA,
    communication_seconds,
    energy_joules,
    round_seconds,
)
from fedpara.wire.link import Link, parse_encoding
from fedpara.wire.meter import Meter, RoundTraffic
from fedpara.wire.share import combine, guard, pack, split, unpack

__all__ = [
    "JOULES_PER_BIT",
    "PAPER_MEGA",
    "AnyMessage",
    "Header",
    "Link",
    "Message",
    "Meter",
    "RoundTraffic",
    "Spec",
    "admit",
    "combine",
    "communication_seconds",
    "decode",
    "encode",
    "energy_joules",
    "guard",
    "make_message",
    "pack",
    "parse_encoding",
    "round_seconds",
    "spec_of",
    "split",
    "split_messages",
    "unpack",
]
