"""The Flower engine: clients train on nodes elsewhere, under the same server loop as in every engine.

    before a round   a hello to every new node: which clients does it serve, with which version and model?
    in a round       one request per client; responses until the deadline, returned in the cohort's order
    after a round    clients whose updates were accepted are informed with their next request
    after the last   one request for each client whose own model is to be scored

The engine uses Flower only through a `Transport`; the one over Flower's Grid is in `apps/flower/grid.py`.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch

from fedpara.engines.client import Reply
from fedpara.engines.differences import PerClient
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
from fedpara.engines.flower.secure import SECURE_KINDS, join_bodies, stage_limit, waves
from fedpara.engines.local.worker import Worker
from fedpara.engines.memory import ClientMemory
from fedpara.engines.program import base_digest
from fedpara.engines.session import Session
from fedpara.errors import RunError, WireError
from fedpara.secure.messages import Stage
from fedpara.state import State
from fedpara.tasks import Score, Task
from fedpara.wire import Message
from fedpara.wire.tensors import in_one_line

ACCEPTED = "accepted"


@dataclass
class _OpenRequests:
    """Requests without a response yet, by message id, and the replies so far."""

    kind: str
    round: int
    end: float
    pending: dict[str, int] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)


class Flower:
    name = "flower"
    why = "one request per client, each on its node"

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
        sources: str = "",
        device: torch.device | None = None,
        keys: Keys | None = None,
        counts: ExampleCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`experiment` is the TOML from which each node builds its part; `run` names the run on the nodes' disks.

        The server scores on `device`. `sources` is the digest of the source files that the experiment references; each
        node must have the same.
        """
        self.session, self.task, self.memory, self.policy = session, task, memory, policy
        self.transport, self.cohort = transport, cohort
        self.worker = Worker(session.program, task, device)
        self._template = Request("hello", experiment, version, run, policy.hello, policy.threads)
        self._limits = {"train": size_limit(session.up), "score": 0}
        self._limits |= dict.fromkeys(SECURE_KINDS, stage_limit(session, cohort + policy.oversample))
        self._counts, self._clock, self._sleep = counts, clock, sleep
        self._late: dict[str, tuple[int, int, str]] = {}
        self.roster = Roster(
            transport,
            policy,
            self._template,
            scheme=session.program.scheme,
            digest=digest(session),
            sources=sources,
            clients=clients,
            keys=keys,
            counts=counts,
            clock=clock,
            sleep=sleep,
        )

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        yield from self._late_replies()
        request = replace(
            self._template, kind="train", round=round, personal=personal, message=bytes(message)
        )
        yield from self._ask(request, clients, self._found(clients), message)

    def stage(
        self, stage: Stage, round: int, bodies: Mapping[int, bytes], message: Message, personal: bool
    ) -> Iterator[Reply]:
        """One stage of secure aggregation: a request per client, in waves of at most one per node."""
        first, clients = stage == "keys", list(bodies)
        if first:
            yield from self._late_replies()
        hosts = self._found(clients) if first else self.roster.hosts(clients)
        request = replace(self._template, kind=stage, round=round, personal=personal)
        if stage == "masked":
            model = bytes(message)
            bodies = {client: join_bodies(body, model) for client, body in bodies.items()}
        for wave in waves(clients, hosts):
            yield from self._ask(request, wave, hosts, bodies)

    def _found(self, clients: Sequence[int]) -> dict[int, int]:
        """The node of each client that has one. RunError if too few have one."""
        needed = min(self.policy.minimum, len(clients))  # lost clients are not asked
        hosts = self.roster.find(clients, needed)
        if len(hosts) < needed:
            raise RunError(
                f"{len(hosts)} of the round's {len(clients)} clients have a node after {self.policy.wait:g} s; the "
                f"policy needs {self.policy.minimum}{self.roster.refusals()}. Finished rounds are saved: start "
                "the nodes and resume the run."
            )
        return hosts

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Reply]:
        """Scores each client's own model on its own test data; no memory changes.

        Asks as many clients at a time as a cohort has, so that the deadline applies as in a round. A client without a
        node gets a reason and does not stop the run, because all rounds are done.
        """
        self.roster.find(clients, len(clients))
        request = replace(self._template, kind="score", round=round, message=bytes(message))
        for start in range(0, len(clients), self.cohort):
            some = clients[start : start + self.cohort]
            yield from self._ask(request, some, self.roster.hosts(some), message)

    def examples(self, client: int) -> int:
        """The number that the client's node stated in its first hello; 0 if it stated none."""
        return self._counts.examples(client) if self._counts is not None else 0

    def commit(self, round: int, clients: Sequence[int]) -> None:
        """Stores the round for each client's next request, which informs the client. A resumed run reads it too."""
        if self.session.stateful:
            for client in clients:
                self.memory.put(client, round, {ACCEPTED: {"round": torch.tensor(round)}})

    def evaluate(self, state: State) -> Score | None:
        return self.worker.evaluate(state, self.task.test) if self.task.test is not None else None

    def _accepted(self, client: int) -> int:
        memory = self.memory.get(client) if self.session.stateful else None
        return int(memory[ACCEPTED]["round"]) if memory else 0

    def _own_part(self, message: Message | Mapping[int, bytes], client: int) -> dict[str, Any]:
        """The fields of a request that are specific to the client: the round of its stored state, and its message."""
        if isinstance(message, PerClient):
            return {"accepted": message.last(client), "message": b"".join(map(bytes, message.to(client)))}
        own = {"message": message[client]} if isinstance(message, Mapping) else {}
        return {"accepted": self._accepted(client), **own}

    def _ask(
        self,
        request: Request,
        clients: Sequence[int],
        hosts: Mapping[int, int],
        message: Message | Mapping[int, bytes],
    ) -> Iterator[Reply]:
        """One reply per client, in order, by the deadline. `request` is completed for each client.

        `message` is the server's, or a message for each client.
        """
        open_requests = _OpenRequests(request.kind, request.round, self._clock() + self.policy.deadline)
        asked = [client for client in clients if client in hosts]
        packets = [
            (
                hosts[client],
                to_packet(
                    replace(
                        request,
                        seconds=self.policy.deadline,
                        client=client,
                        **self._own_part(message, client),
                    )
                ),
            )
            for client in asked
        ]
        names = self.transport.send(packets, self.policy.deadline) if packets else []
        for client, name in zip(asked, names, strict=True):
            if name:
                open_requests.pending[name] = client
            else:
                open_requests.replies[client] = Reply(
                    client, reason="its request could not be sent", reached=False
                )
        self._await(open_requests)
        for name, client in open_requests.pending.items():
            if request.kind != "score":  # a late score has no bytes to count
                self._late[name] = client, request.round, request.kind
            if self._clock() >= open_requests.end:
                # The node may be dead: a hello next time shows it sooner than a round's deadline.
                self.roster.doubt(hosts[client])
        for client in clients:
            yield open_requests.replies.get(client) or Reply(
                client, reason=self._absence(client, hosts, open_requests.end), reached=client in hosts
            )

    def _await(self, open_requests: _OpenRequests) -> None:
        while open_requests.pending:
            for name, got in self.transport.collect(list(open_requests.pending)).items():
                client = open_requests.pending.pop(name)
                open_requests.replies[client] = self._reply(
                    got, client, open_requests.round, open_requests.kind
                )
            good = sum(reply.message is not None for reply in open_requests.replies.values())
            enough = self.policy.oversample and good >= self.cohort
            if not open_requests.pending or enough or self._clock() >= open_requests.end:
                return
            self._sleep(self.policy.poll)

    def _reply(self, got: Packet | str, client: int, round: int, kind: str) -> Reply:
        if isinstance(got, str):
            return Reply(client, reason=in_one_line(got))
        try:
            response = from_packet(got, Response, self._limits[kind])
            if (response.client, response.round) != (client, round):
                raise WireError(
                    f"it responds for client {response.client} in round {response.round}: expected client {client} "
                    f"in round {round}."
                )
            for score in (response.before, response.after):
                if score is not None and score.examples and score.values.keys() != self.task.scored.keys():
                    raise WireError(
                        f"it scores {', '.join(score.values) or 'nothing'}: expected {', '.join(self.task.scored)}."
                    )
            trained = kind in ("train", "masked")
            if trained and response.message and not math.isfinite(response.loss):
                raise WireError(f"its loss is {response.loss}: expected a finite number.")
        except WireError as error:
            return Reply(client, reason=str(error), unread=len(got.body))
        wanted = response.message if kind != "score" else response.before
        if not wanted and not response.reason:
            expected = "a message" if kind != "score" else "a score"
            return Reply(client, reason=f"its response is empty: expected {expected} or a reason")
        return replace(response.reply, reason=in_one_line(response.reason))

    def _absence(self, client: int, hosts: Mapping[int, int], end: float) -> str:
        if client not in hosts:
            return self.roster.absence(client)
        if self._clock() < end:
            return "the round had enough replies without it"
        return f"no reply within {self.policy.deadline:g} s"

    def _late_replies(self) -> Iterator[Reply]:
        """Replies to earlier rounds that have arrived since: they are not used, but their bytes count."""
        for name, got in self.transport.collect(list(self._late)).items() if self._late else ():
            client, round, kind = self._late.pop(name)
            if not isinstance(got, str):
                reply = self._reply(got, client, round, kind)
                yield Reply(client, unread=len(reply.message or b"") or reply.unread, late=round)


def digest(session: Session) -> str:
    """A digest of the names, types and shapes of both messages, to check that both ends agree.

    A second one, of the frozen tensors, follows after "+" if there are any. On a downlink that sends differences the
    initial state is part of the first.
    """
    lines = [
        f"{name} {kind} {tuple(shape)}"
        for spec in (session.down, session.up)
        for name, (kind, shape) in spec.items()
    ]
    if session.differences:
        lines.append(base_digest(session.first_known(), {}))
    messages = sha256("\n".join([session.algorithm.name, *lines]).encode()).hexdigest()[:16]
    return f"{messages}+{session.program.base}" if session.program.base else messages
