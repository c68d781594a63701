"""Requests and responses between the server and its nodes: named facts, and at most one encoded message.

    Request    server to node: a hello, one client's part of a round, or the score of one client's own model
    Hello      node to server: which clients it serves, and with which model
    Response   node to server: a client's message or score, or the reason why there is none

A `Packet` holds any of them in types that every transport has; a `Transport` carries packets. Nothing in a packet is
trusted: reading one raises WireError for a fact that is missing or has the wrong type.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, get_type_hints

from fedpara.engines.client import Reply
from fedpara.errors import WireError
from fedpara.tasks import Score
from fedpara.tasks.metrics import FRACTIONS
from fedpara.wire import Spec
from fedpara.wire.codec import DIGEST, MAX_HEADER
from fedpara.wire.tensors import shown

Fact = str | int | float | bool
Packable = TypeVar("Packable", "Request", "Hello", "Response")

MAX_TEXT = 1 << 16


@dataclass(frozen=True)
class Packet:
    facts: Mapping[str, Fact]
    body: bytes = b""


class Transport(Protocol):
    def nodes(self) -> Mapping[int, bytes]:
        """The connected nodes, each with the public key it proved to hold, or b""."""

    def send(self, packets: Sequence[tuple[int, Packet]], seconds: float) -> list[str]:
        """A message id for each packet; "" if it could not be sent."""

    def collect(self, ids: Collection[str]) -> Mapping[str, Packet | str]:
        """The responses so far, each returned once. A string states why there will be none."""


@dataclass(frozen=True)
class Request:
    """`accepted` is the last round in which the server accepted the client's update; its memory belongs to that round.
    In a run that folds, it is the round after which the client's base was folded.

    `run` names the run on the node's disk; `seconds` is how long the server waits for the response.
    """

    kind: str  # "hello", "train", "score", or a stage of secure aggregation
    experiment: str  # TOML
    version: str
    run: str
    seconds: float
    threads: int = 0  # 0 lets the node decide
    client: int = 0
    round: int = 0
    accepted: int = 0
    personal: bool = False
    message: bytes = b""


@dataclass(frozen=True)
class Hello:
    """The node serves the clients i with i % every == first."""

    version: str
    first: int = 0
    every: int = 1
    scheme: str = ""
    digest: str = ""  # of names, shapes and types of both messages, and of the frozen tensors
    examples: int = 0  # per client, if the node brings its own data
    sources: str = ""  # digest of the source files that the experiment references
    reason: str = ""  # why it cannot take part
    message: bytes = b""

    def clients(self, total: int) -> range:
        """The clients that the node serves, of `total`."""
        return range(self.first, total, self.every)


@dataclass(frozen=True)
class Response:
    client: int
    round: int
    message: bytes = b""
    reason: str = ""
    loss: float = math.nan
    before: Score | None = None
    after: Score | None = None

    @property
    def reply(self) -> Reply:
        return Reply(self.client, self.message or None, self.reason, self.loss, self.before, self.after)


def to_packet(content: Request | Hello | Response) -> Packet:
    facts: dict[str, Fact] = {}
    for field in fields(content):
        value = getattr(content, field.name)
        if isinstance(value, Score):
            facts[f"{field.name}-examples"] = value.examples
            facts |= {f"{field.name}:{metric}": float(number) for metric, number in value.values.items()}
        elif value is not None and field.name != "message":
            facts[field.name] = value
    return Packet(facts, content.message)


def from_packet(packet: Packet, kind: type[Packable], limit: int) -> Packable:
    """`limit` bounds the size of the message, before it is read."""
    if len(packet.body) > limit:
        raise WireError(f"a message of {len(packet.body)} bytes: expected at most {limit}.")
    values: dict[str, Any] = {"message": packet.body}
    for name, hint in get_type_hints(kind).items():
        if name == "message":
            continue
        if name in ("before", "after"):
            values[name] = _score(packet.facts, name)
        else:
            values[name] = _fact(packet.facts, name, hint)
    return kind(**values)


def size_limit(spec: Spec) -> int:
    """An upper bound on the size of a message of this spec: no link makes a number wider."""
    tensors = sum(shape.numel() * dtype.itemsize for dtype, shape in spec.values())
    described = sum(2 * len(name.encode()) + 256 for name in spec)
    return 8 + MAX_HEADER + tensors + described + MAX_HEADER + DIGEST


def _score(facts: Mapping[str, Fact], name: str) -> Score | None:
    if f"{name}-examples" not in facts:
        return None
    examples = _fact(facts, f"{name}-examples", int)
    if examples < 0:
        raise WireError(f"{name} covers {examples} examples: expected none or more.")
    values = {
        fact.partition(":")[2]: _fact(facts, fact, float) for fact in facts if fact.startswith(f"{name}:")
    }
    for metric, value in values.items():
        if metric in FRACTIONS and not 0 <= value <= 1:
            raise WireError(
                f"{name}: {'an' if metric[0] in 'ai' else 'a'} {metric} of {value}: expected 0 to 1."
            )
    return Score(examples, values)


def _fact(facts: Mapping[str, Fact], name: str, kind: type) -> Any:
    value = facts.get(name)
    if kind is float and type(value) is int and abs(value) < 1 << 64:
        value = float(value)
    if type(value) is not kind:
        raise WireError(f"{name} is {shown(value)}: expected {kind.__name__}.")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise WireError(f"{name} is a text of {len(value)} characters: expected at most {MAX_TEXT}.")
    return value
