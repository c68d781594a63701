"""The engine for several GPUs: every rank trains a share of the cohort, and one exchange per round joins them.

    replies of rank r = inner.train(share r);  all ranks: replies = all_gather;  aggregate in the cohort's order

Every rank runs the same server loop on the same replies, so all ranks have the same bits. A single process may differ
in the last bits, because one GPU sums its updates on the device. Ranks exchange encoded messages and scores; a
client's memory stays on its rank.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from fedpara.algorithms import Local, Variables
from fedpara.engines.client import Reply
from fedpara.engines.distributed.process_group import Part, ProcessGroup
from fedpara.engines.memory import ClientMemory
from fedpara.engines.server.engine import Engine
from fedpara.engines.session import Session
from fedpara.errors import RunError
from fedpara.state import State
from fedpara.tasks import Score
from fedpara.wire import Message


class Distributed:
    def __init__(self, group: ProcessGroup, inner: Engine, session: Session) -> None:
        self.group, self.inner = group, inner
        self.by_number = session.stateful
        local = [_numbers(one.algorithm.local) for one in session.trainings]
        settings = (session.algorithm.name, *local, session.link, session.seed)
        self._settings = zlib.crc32(repr(settings).encode())
        self._mine: list[int] = []

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def why(self) -> str:
        return f"{self.group.size} ranks ({self.group.backend}), each: {self.inner.why}"

    def share(self, clients: Sequence[int], rank: int) -> list[int]:
        """By client number if clients have memories, so that each stays on its rank; otherwise evenly by position."""
        size = self.group.size
        if self.by_number:
            return [client for client in clients if client % size == rank]
        return list(clients[rank::size])

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        self._mine = mine = self.share(clients, self.group.rank)
        task = zlib.crc32(bytes(message), zlib.crc32(repr((*clients, personal)).encode(), self._settings))

        def work() -> Part:
            replies = list(self.inner.train(round, mine, message, personal)) if mine else []
            messages = [bytes(reply.message) for reply in replies if reply.message is not None]
            return Part({"task": task, "replies": [_facts(reply) for reply in replies]}, messages)

        parts = self.group.gather(f"round {round}", work)
        for rank, part in enumerate(parts):
            if part.header["task"] != parts[0].header["task"]:
                raise RunError(
                    f"rank {rank} has a different model, cohort or seed than rank 0 in round {round}: use the same "
                    "settings, run folder and versions of fedpara and torch on every rank."
                )
        yield from _in_order(parts, clients)

    def commit(self, round: int, clients: Sequence[int]) -> None:
        """Returns once every rank has committed, so that no checkpoint is ahead of the memories."""

        def work() -> Part:
            self.inner.commit(round, [client for client in clients if client in self._mine])
            return Part()

        self.group.gather(f"the end of round {round}", work)

    def evaluate(self, state: State) -> Score | None:
        """Rank 0's score, so that all ranks stop in the same round."""

        def work() -> Part:
            return Part(
                {"score": _score_numbers(self.inner.evaluate(state)) if self.group.rank == 0 else None}
            )

        return _score(self.group.gather("the evaluation", work)[0].header["score"])

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Reply]:
        """Every rank scores the clients whose memories it holds."""
        mine = self.share(clients, self.group.rank)

        def work() -> Part:
            return Part({"replies": [_facts(r) for r in self.inner.score_clients(round, mine, message)]})

        yield from _in_order(self.group.gather("the scores of all clients", work), clients)


class RankMemory:
    """A memory that raises RunError for a client whose memory is on another rank."""

    def __init__(self, memory: ClientMemory, engine: Distributed) -> None:
        self.memory, self.engine = memory, engine

    def get(self, client: int) -> Variables | None:
        group = self.engine.group
        if self.engine.by_number and client % group.size != group.rank:
            raise RunError(
                f"the memory of client {client} is on rank {client % group.size}, and this is rank {group.rank}: "
                "private parts are not exchanged, so read it there."
            )
        return self.memory.get(client)

    def put(self, client: int, round: int, variables: Variables) -> None:
        self.memory.put(client, round, variables)


def _facts(reply: Reply) -> dict[str, Any]:
    """A reply without its message."""
    return {
        "client": reply.client,
        "sent": reply.message is not None,
        "reason": reply.reason,
        "loss": reply.loss,
        "before": _score_numbers(reply.before),
        "after": _score_numbers(reply.after),
        "diverged": reply.diverged,
    }


def _in_order(parts: Iterable[Part], clients: Sequence[int]) -> list[Reply]:
    """The replies of all ranks, in the order of the clients, so that every mean has the bits of a single process."""
    replies = [reply for part in parts for reply in _replies(part)]
    position = {client: i for i, client in enumerate(clients)}
    return sorted(replies, key=lambda reply: position.get(reply.client, len(position)))


def _replies(part: Part) -> Iterator[Reply]:
    messages = iter(part.blobs)
    for facts in part.header["replies"]:
        yield Reply(
            facts["client"],
            next(messages) if facts["sent"] else None,
            facts["reason"],
            facts["loss"],
            _score(facts["before"]),
            _score(facts["after"]),
            diverged=facts["diverged"],
        )


def _score_numbers(score: Score | None) -> list[Any] | None:
    return None if score is None else [score.examples, dict(score.values)]


def _score(numbers: list[Any] | None) -> Score | None:
    return None if numbers is None else Score(*numbers)


def _numbers(local: Local) -> list[object]:
    """The settings that have the same repr on every rank; a function's has its address."""
    values = [getattr(local, field.name) for field in fields(local)]
    return [value for value in values if value is None or isinstance(value, str | int | float | tuple)]
