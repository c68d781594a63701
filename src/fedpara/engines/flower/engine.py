"""The Flower engine: the clients are on nodes elsewhere, the server's loop is `loop.play` as everywhere.

    before a round   hello to nodes that are not known yet: who serves which client, with which package
    in a round       one order a client, answers until the deadline, handed over in the cohort's order
    after it         the clients whose updates were taken learn so with their next order
    after the last   one order a client whose own model is to be scored

Flower itself is met through a `Transport` only; the one that carries packets over its Grid is in `apps`.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import torch

from fedpara.engines.client import Reply
from fedpara.engines.flower.example_counts import ExampleCounts
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.roster import Keys, Roster
from fedpara.engines.flower.rpc import (
    Packet,
    Request,
    Response,
    Transport,
    from_packet,
    size_limit,
    to_packet,
)
from fedpara.engines.local.worker import Score, Worker
from fedpara.engines.memory import ClientMemory
from fedpara.engines.session import Session
from fedpara.engines.task import Task
from fedpara.errors import RunError, WireError
from fedpara.state import State
from fedpara.wire import Message
from fedpara.wire.tensors import in_one_line

ACCEPTED = "accepted"


@dataclass
class _Open:
    """Letters whose answers are still awaited, by client, and the replies that came."""

    kind: str
    round: int
    end: float
    pending: dict[str, int] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)


class Flower:
    name = "flower"
    why = "one client a message, each on its node"

    def __init__(
        self,
        session: Session,
        task: Task,
        memory: ClientMemory,
        transport: Transport,
        policy: Policy,
        *,
        experiment: str,
        run: str,
        version: str,
        clients: int,
        cohort: int,
        tell: Callable[[str], None],
        keys: Keys | None = None,
        counts: ExampleCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`experiment` is the TOML each node builds its part from; `run` names the run on the nodes' disks."""
        self.session, self.task, self.memory, self.policy = session, task, memory, policy
        self.transport, self.cohort = transport, cohort
        self.worker = Worker(session.program, task.augment)
        self._blank = Request("hello", experiment, version, run, policy.hello, policy.threads)
        self._limit = size_limit(session.up)
        self._counts, self._clock, self._sleep = counts, clock, sleep
        self._late: dict[str, tuple[int, int]] = {}
        self.roster = Roster(
            transport,
            policy,
            self._blank,
            scheme=session.program.scheme,
            digest=digest(session),
            clients=clients,
            keys=keys,
            counts=counts,
            tell=tell,
            clock=clock,
            sleep=sleep,
        )

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        yield from self._late_replies()
        hosts = self.roster.find(clients, self.policy.minimum)
        if len(hosts) < self.policy.minimum:
            raise RunError(
                f"{len(hosts)} of the round's {len(clients)} clients have a node after {self.policy.wait:g} s; the "
                f"policy needs {self.policy.minimum}{self.roster.refusals()}. Finished rounds are saved: start "
                "the nodes and resume the run."
            )
        order = replace(self._blank, kind="train", round=round, personal=personal, message=bytes(message))
        yield from self._ask(order, clients, hosts)

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Reply]:
        """Each client's own model on its own test data: `Reply.before`, or a reason. No client keeps anything.

        A cohort's number of clients at a time, so that the deadline means what it means in a round. A client without a
        node gets a reason; it does not stop the run, whose rounds are done.
        """
        self.roster.find(clients, len(clients))
        order = replace(self._blank, kind="score", round=round, message=bytes(message))
        for start in range(0, len(clients), self.cohort):
            some = clients[start : start + self.cohort]
            yield from self._ask(order, some, self.roster.hosts(some))

    def examples(self, client: int) -> int:
        """How many the client's node stated at its first hello; 0 where it stated none."""
        return self._counts.examples(client) if self._counts is not None else 0

    def commit(self, round: int, clients: Sequence[int]) -> None:
        """Told to a client with its next order; noted here so that a resumed server tells it the same."""
        if self.session.stateful:
            for client in clients:
                self.memory.put(client, round, {ACCEPTED: {"round": torch.tensor(round)}})

    def evaluate(self, state: State) -> Score | None:
        return self.worker.evaluate(state, self.task.test) if self.task.test is not None else None

    def _accepted(self, client: int) -> int:
        groups = self.memory.get(client) if self.session.stateful else None
        return int(groups[ACCEPTED]["round"]) if groups else 0

    def _ask(self, order: Request, clients: Sequence[int], hosts: Mapping[int, int]) -> Iterator[Reply]:
        """One reply a client, in their order, by the deadline; `order` is completed for each of them."""
        open_ = _Open(order.kind, order.round, self._clock() + self.policy.deadline)
        asked = [client for client in clients if client in hosts]
        packets = [
            (
                hosts[client],
                to_packet(
                    replace(
                        order, seconds=self.policy.deadline, client=client, accepted=self._accepted(client)
                    )
                ),
            )
            for client in asked
        ]
        names = self.transport.send(packets, self.policy.deadline) if packets else []
        for client, name in zip(asked, names, strict=True):
            if name:
                open_.pending[name] = client
            else:
                open_.replies[client] = Reply(client, reason="its order could not be sent", reached=False)
        self._await(open_)
        for name, client in open_.pending.items():
            if order.kind == "train":  # a score that comes late has no bytes to count
                self._late[name] = client, order.round
            if self._clock() >= open_.end:
                # Dead or hanging: whether it is there is asked anew, which takes less than a round's deadline.
                self.roster.doubt(hosts[client])
        for client in clients:
            yield open_.replies.get(client) or Reply(
                client, reason=self._absence(client, hosts, open_.end), reached=client in hosts
            )

    def _await(self, open_: _Open) -> None:
        while open_.pending:
            for name, got in self.transport.collect(list(open_.pending)).items():
                client = open_.pending.pop(name)
                open_.replies[client] = self._reply(got, client, open_.round, open_.kind)
            good = sum(reply.message is not None for reply in open_.replies.values())
            enough = self.policy.oversample and good >= self.cohort
            if not open_.pending or enough or self._clock() >= open_.end:
                return
            self._sleep(self.policy.poll)

    def _reply(self, got: Packet | str, client: int, round: int, kind: str) -> Reply:
        if isinstance(got, str):
            return Reply(client, reason=in_one_line(got))
        try:
            answer = from_packet(got, Response, self._limit if kind == "train" else 0)
            if (answer.client, answer.round) != (client, round):
                raise WireError(
                    f"it answers for client {answer.client} in round {answer.round}: expected client {client} "
                    f"in round {round}."
                )
            if answer.message and not math.isfinite(answer.loss):
                raise WireError(f"its loss is {answer.loss}: expected a finite number.")
        except WireError as error:
            return Reply(client, reason=str(error), unread=len(got.body))
        wanted = answer.message if kind == "train" else answer.before
        if not wanted and not answer.reason:
            expected = "a message" if kind == "train" else "a score"
            return Reply(client, reason=f"its answer is empty: expected {expected} or a reason")
        return replace(answer.reply, reason=in_one_line(answer.reason))

    def _absence(self, client: int, hosts: Mapping[int, int], end: float) -> str:
        if client not in hosts:
            return self.roster.absence(client)
        if self._clock() < end:
            return "the round had enough replies without it"
        return f"no reply within {self.policy.deadline:g} s"

    def _late_replies(self) -> Iterator[Reply]:
        """Those of earlier rounds that have come since: of no use, but they were sent."""
        for name, got in self.transport.collect(list(self._late)).items() if self._late else ():
            client, round = self._late.pop(name)
            if not isinstance(got, str):
                reply = self._reply(got, client, round, "train")
                yield Reply(client, unread=len(reply.message or b"") or reply.unread, late=round)


def digest(session: Session) -> str:
    """Of the names, types and shapes of both messages: two ends that agree on it can talk."""
    lines = [
        f"{name} {kind} {tuple(shape)}"
        for spec in (session.down, session.up)
        for name, (kind, shape) in spec.items()
    ]
    return sha256("\n".join([session.algorithm.name, *lines]).encode()).hexdigest()[:16]
