"""The Flower engine: the clients are on nodes elsewhere, the server's loop is `loop.play` as everywhere.

    before a round   hello to nodes that are not known yet: who serves which client, with which package
    in a round       one order a client, answers until the deadline, handed over in the cohort's order
    after it         the clients whose updates were taken learn so with their next order

Flower itself is met through a `Courier` only; the one that carries parcels over its Grid is in `apps`.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Protocol as Interface

import torch

from fedpara.engines.client import Protocol, Reply
from fedpara.engines.loop import Schedule
from fedpara.engines.memory import ClientMemory
from fedpara.engines.parcels import Answer, Hello, Order, Parcel, packed, size_limit, unpacked
from fedpara.engines.task import Task
from fedpara.engines.worker import Score, Worker
from fedpara.errors import ConfigError, RunError, WireError
from fedpara.state import State
from fedpara.wire import Letter
from fedpara.wire.tensors import in_one_line, shown

ACCEPTED = "accepted"
LONGEST = 100_000_000
"""Seconds, three years: clocks and timers take no more than some."""


class Courier(Interface):
    def nodes(self) -> list[int]:
        """Those that can be reached now."""

    def send(self, parcels: Sequence[tuple[int, Parcel]], seconds: float) -> list[str]:
        """A letter's name for each parcel; an empty one where it could not be sent."""

    def collect(self, letters: Collection[str]) -> Mapping[str, Parcel | str]:
        """Answers that came to these letters, each once; a text says why there will be none."""


@dataclass(frozen=True)
class Terms:
    """What the server grants its clients."""

    deadline: float = 3600.0  # seconds a round
    minimum: int = 1  # good replies, else the round keeps the model
    oversample: int = 0  # clients asked beyond the cohort, whose number of answers ends the round
    wait: float = 120.0  # seconds for nodes to appear, at the start and after a resume
    hello: float = 60.0  # seconds for a node to introduce itself
    poll: float = 0.5
    threads: int = 0  # of each client; 0 leaves it to the node

    def __post_init__(self) -> None:
        for name in ("deadline", "hello", "poll", "wait"):
            seconds = getattr(self, name)
            least = "0 or more" if name == "wait" else "above 0"
            if not (0 < seconds <= LONGEST or (seconds == 0 and name == "wait")):
                raise ConfigError(
                    f"{name} is {seconds}: expected a number of seconds {least}, up to {LONGEST:,}."
                )
        for name in ("minimum", "oversample", "threads"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                shown_as = "min_replies" if name == "minimum" else name
                raise ConfigError(f"{shown_as} is {value}: expected a whole number of 0 or more.")

    def schedule(self, schedule: Schedule) -> Schedule:
        if not 1 <= self.minimum <= schedule.cohort:
            raise ConfigError(
                f"min_replies is {self.minimum}: expected 1 to the cohort of {schedule.cohort}."
            )
        asked = schedule.cohort + self.oversample
        if asked > schedule.clients:
            raise ConfigError(
                f"oversample is {self.oversample}: a cohort of {schedule.cohort} and that many more are beyond "
                f"the {schedule.clients} clients."
            )
        return replace(schedule, cohort=asked, minimum=self.minimum)


@dataclass
class _Open:
    """Letters whose answers are still awaited, by client."""

    letters: dict[str, int] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)


class Flower:
    name = "flower"
    why = "one client a message, each on its node"

    def __init__(
        self,
        protocol: Protocol,
        task: Task,
        memory: ClientMemory,
        courier: Courier,
        terms: Terms,
        *,
        experiment: str,
        run: str,
        version: str,
        cohort: int,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`experiment` is the TOML each node builds its part from; `run` names the run on the nodes' disks."""
        self.protocol, self.task, self.memory, self.terms = protocol, task, memory, terms
        self.courier, self.cohort, self.tell = courier, cohort, tell
        self.worker = Worker(protocol.program, task.augment)
        self._blank = Order("hello", experiment, version, run, terms.hello, terms.threads)
        self._limit = size_limit(protocol.up)
        self._clock, self._sleep = clock, sleep
        self._known: dict[int, Hello] = {}
        self._refused: dict[int, str] = {}
        self._hellos: dict[str, tuple[int, float]] = {}
        self._late: dict[str, tuple[int, int]] = {}
        self._begun = False

    def train(self, round: int, clients: Sequence[int], message: Letter, personal: bool) -> Iterator[Reply]:
        yield from self._late_replies()
        hosts, sealed = self._find(clients), bytes(message)
        end = self._clock() + self.terms.deadline
        orders = [
            replace(
                self._blank,
                kind="train",
                seconds=self.terms.deadline,
                client=client,
                round=round,
                accepted=self._accepted(client),
                personal=personal,
                message=sealed,
            )
            for client in clients
            if client in hosts
        ]
        parcels = [(hosts[order.client], packed(order)) for order in orders]
        names = self.courier.send(parcels, self.terms.deadline) if parcels else []
        open_ = _Open()
        for order, name in zip(orders, names, strict=True):
            if name:
                open_.letters[name] = order.client
            else:
                open_.replies[order.client] = Reply(
                    order.client, reason="its order could not be sent", reached=False
                )
        self._await(open_, round, end)
        for name, client in open_.letters.items():
            self._late[name] = client, round
            if self._clock() >= end:
                # Dead or hanging: whether it is there is asked anew, which takes less than a round's deadline.
                self._known.pop(hosts[client], None)
        for client in clients:
            yield open_.replies.get(client) or Reply(
                client, reason=self._absence(client, hosts, end), reached=client in hosts
            )

    def keep(self, round: int, clients: Sequence[int]) -> None:
        """Told to a client with its next order; noted here so that a resumed server tells it the same."""
        if self.protocol.keeps:
            for client in clients:
                self.memory.put(client, round, {ACCEPTED: {"round": torch.tensor(round)}})

    def evaluate(self, state: State) -> Score | None:
        return self.worker.evaluate(state, self.task.test) if self.task.test is not None else None

    def _accepted(self, client: int) -> int:
        groups = self.memory.get(client) if self.protocol.keeps else None
        return int(groups[ACCEPTED]["round"]) if groups else 0

    def _await(self, open_: _Open, round: int, end: float) -> None:
        while open_.letters:
            for name, got in self.courier.collect(list(open_.letters)).items():
                client = open_.letters.pop(name)
                open_.replies[client] = self._reply(got, client, round)
            good = sum(reply.message is not None for reply in open_.replies.values())
            if not open_.letters or (self.terms.oversample and good >= self.cohort) or self._clock() >= end:
                return
            self._sleep(self.terms.poll)

    def _reply(self, got: Parcel | str, client: int, round: int) -> Reply:
        if isinstance(got, str):
            return Reply(client, reason=in_one_line(got))
        try:
            answer = unpacked(got, Answer, self._limit)
            if (answer.client, answer.round) != (client, round):
                raise WireError(
                    f"it answers for client {answer.client} in round {answer.round}: expected client {client} "
                    f"in round {round}."
                )
            if answer.message and not math.isfinite(answer.loss):
                raise WireError(f"its loss is {answer.loss}: expected a finite number.")
        except WireError as error:
            return Reply(client, reason=str(error), unread=len(got.body))
        if not answer.message and not answer.reason:
            return Reply(client, reason="its answer is empty: expected a message or a reason")
        return replace(answer.reply, reason=in_one_line(answer.reason))

    def _absence(self, client: int, hosts: Mapping[int, int], end: float) -> str:
        if client not in hosts:
            return f"no node serves it{self._refusals()}"
        if self._clock() < end:
            return "the round had enough replies without it"
        return f"no reply within {self.terms.deadline:g} s"

    def _late_replies(self) -> Iterator[Reply]:
        """Those of earlier rounds that have come since: of no use, but they were sent."""
        for name, got in self.courier.collect(list(self._late)).items() if self._late else ():
            client, round = self._late.pop(name)
            if not isinstance(got, str):
                reply = self._reply(got, client, round)
                yield Reply(client, unread=len(reply.message or b"") or reply.unread, late=round)

    def _find(self, clients: Sequence[int]) -> dict[int, int]:
        """The node of each client, where one is there.

        Nodes are given time to appear at first, and whenever there are too few for a round to count.
        """
        started, asked = self._clock(), set[int]()
        while True:
            here = set(self.courier.nodes())
            self._known = {node: hello for node, hello in self._known.items() if node in here}
            missing = len(self._hosts(clients)) < len(clients)
            fresh = here - self._known.keys() - asked - (set() if missing else self._refused.keys())
            if fresh:
                asked |= self._greet(fresh)
            hosts = self._hosts(clients)
            enough = len(hosts) == len(clients) or (self._begun and len(hosts) >= self.terms.minimum)
            if enough or self._clock() >= started + self.terms.wait:
                break
            self._sleep(self.terms.poll)
        if len(hosts) < self.terms.minimum:
            raise RunError(
                f"{len(hosts)} of the round's {len(clients)} clients have a node after {self.terms.wait:g} s: expected "
                f"at least {self.terms.minimum}{self._refusals()}. What was finished is saved; start the nodes and "
                "go on with the run."
            )
        self._begun = True
        return hosts

    def _refusals(self) -> str:
        said = "; ".join(f"node {node} was refused: {why}" for node, why in self._refused.items())
        return f" ({said})" if said else ""

    def _hosts(self, clients: Sequence[int]) -> dict[int, int]:
        """Where several nodes claim a client, the one that said hello last has it."""
        return {
            client: node for client in clients for node, hello in self._known.items() if hello.serves(client)
        }

    def _greet(self, nodes: Collection[int]) -> set[int]:
        """Those of them that answered. One that is silent is not asked again while its hello may still come back."""
        waited = {node for node, _ in self._hellos.values()}
        new = sorted(set(nodes) - waited)
        names = (
            self.courier.send([(node, packed(self._blank)) for node in new], self.terms.hello) if new else []
        )
        now = self._clock()
        self._hellos |= {
            name: (node, now + self.terms.hello) for node, name in zip(new, names, strict=True) if name
        }
        met: set[int] = set()
        while self._hellos:
            for name, got in self.courier.collect(list(self._hellos)).items():
                node, _ = self._hellos.pop(name)
                self._meet(node, got)
                met.add(node)
            if not self._hellos or self._clock() >= now + self.terms.hello or met >= set(nodes):
                break
            self._sleep(self.terms.poll)
        for name, (node, end) in list(self._hellos.items()):
            if self._clock() >= end:
                self._refuse(node, f"it did not answer a hello within {self.terms.hello:g} s")
            if self._clock() >= end + self.terms.hello:
                del self._hellos[name]
        return met

    def _meet(self, node: int, got: Parcel | str) -> None:
        try:
            hello = unpacked(got, Hello, 0) if isinstance(got, Parcel) else None
        except WireError as error:
            return self._refuse(node, f"its hello cannot be read: {error}")
        if hello is None:
            return self._refuse(node, in_one_line(str(got)))
        if not 0 <= hello.first < hello.every:
            return self._refuse(node, f"it is number {hello.first} of {hello.every}: expected 0 to one less")
        wanted = (self._blank.version, self.protocol.program.scheme, digest(self.protocol))
        if hello.version != wanted[0]:
            return self._refuse(
                node,
                f"it runs fedpara {in_one_line(hello.version)}, the server {wanted[0]}: install the same",
            )
        if hello.reason:
            return self._refuse(node, in_one_line(hello.reason))
        if hello.scheme != wanted[1]:
            return self._refuse(node, f"its model is {shown(hello.scheme)}, the server's {wanted[1]!r}")
        if hello.digest != wanted[2]:
            return self._refuse(node, "its model has other names, shapes or types than the server's")
        self._refused.pop(node, None)
        self._known[node] = hello
        self.tell(f"node {node} is number {hello.first} of {hello.every}")
        return None

    def _refuse(self, node: int, why: str) -> None:
        if self._refused.get(node) != why:
            self.tell(f"node {node} refused: {why}")
        self._refused[node] = why


def digest(protocol: Protocol) -> str:
    """Of the names, types and shapes of both messages: two ends that agree on it can talk."""
    lines = [
        f"{name} {kind} {tuple(shape)}"
        for spec in (protocol.down, protocol.up)
        for name, (kind, shape) in spec.items()
    ]
    return sha256("\n".join([protocol.algorithm.name, *lines]).encode()).hexdigest()[:16]
