"""The server's loop: broadcast, collect, check, aggregate, evaluate. Every engine runs under it.

for t = 1 .. T:  S = cohort(t);  message = encode(x, extras);  replies = engine.train(S, message)
                 x, server = aggregate(the replies that are admitted)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol as Interface

from fedpara.algorithms import Groups, Update
from fedpara.engines.client import Protocol, Reply, change_coded
from fedpara.engines.streams import cohort, torch_numbers
from fedpara.engines.worker import Score
from fedpara.errors import UpdateRejected, WireError
from fedpara.state import State, add, mean
from fedpara.wire import Meter, admit, encode, guard, pack, unpack


class Engine(Interface):
    @property
    def name(self) -> str: ...

    def train(self, round: int, clients: Sequence[int], message: bytes, personal: bool) -> Iterable[Reply]:
        """One reply a client of the cohort, in the cohort's order."""

    def evaluate(self, state: State) -> Score | None: ...


@dataclass(frozen=True, eq=False)
class Progress:
    """What the server holds between two rounds, and all a checkpoint needs."""

    round: int
    x: State
    buffers: State
    server: Groups
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, eq=False)
class Round:
    """One round as it happened. `accuracy` is None where it was not measured."""

    progress: Progress
    cohort: tuple[int, ...]
    train_loss: float
    bytes_up: int
    bytes_down: int
    refused: tuple[tuple[int, str], ...] = ()
    accuracy: float | None = None
    loss: float | None = None
    before: float | None = None
    after: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def number(self) -> int:
        return self.progress.round


@dataclass(frozen=True)
class Schedule:
    rounds: int
    clients: int
    cohort: int
    evaluate_every: int = 1
    max_norm: float | None = None
    target: float | None = None

    def evaluates(self, round: int) -> bool:
        return round % self.evaluate_every == 0 or round == self.rounds


def beginning(protocol: Protocol) -> Progress:
    program = protocol.program
    x = program.start(program.shared)
    return Progress(0, x, program.start(program.shared_buffers), protocol.algorithm.server_init(x))


def play(
    protocol: Protocol, engine: Engine, schedule: Schedule, personal: bool, start: Progress | None = None
) -> Iterator[Round]:
    """Round after round, from `start` on; ends early once the target accuracy is met."""
    progress = start or beginning(protocol)
    meter = Meter()
    while progress.round < schedule.rounds:
        result = _round(protocol, engine, schedule, personal, progress, meter)
        yield result
        progress = result.progress
        if schedule.target is not None and result.accuracy is not None and result.accuracy >= schedule.target:
            return


def _round(
    protocol: Protocol, engine: Engine, schedule: Schedule, personal: bool, progress: Progress, meter: Meter
) -> Round:
    t = progress.round + 1
    chosen = cohort(protocol.seed, t, schedule.clients, schedule.cohort)
    message = _broadcast(protocol, progress, t)
    sent, _ = protocol.read_down(message, t)
    scores = personal and schedule.evaluates(t)
    updates: list[Update] = []
    buffers: list[State] = []
    replies: list[Reply] = []
    refused: list[tuple[int, str]] = []
    for reply in engine.train(t, chosen, message, scores):
        meter.down(t, reply.client, message)
        if reply.message is None:
            refused.append((reply.client, reply.reason))
            continue
        meter.up(t, reply.client, reply.message)
        try:
            update, averaged = _admit(protocol, schedule, reply, sent, t)
        except WireError as error:
            refused.append((reply.client, str(error)))
            continue
        updates.append(update)
        buffers.append(averaged)
        replies.append(reply)
    notes: tuple[str, ...] = ()
    x, server = progress.x, progress.server
    averages = progress.buffers
    if updates:
        x, server = protocol.algorithm.aggregate(x, server, updates, schedule.clients)
        if averages:
            averages = mean(buffers, [float(update.examples) for update in updates])
    else:
        notes = (f"round {t} had no usable update: the model is kept as it was",)
    traffic = meter.rounds[-1]
    after = Progress(
        t, x, averages, server, progress.bytes_up + traffic.up, progress.bytes_down + traffic.down
    )
    result = Round(
        after,
        tuple(chosen),
        sum(reply.loss for reply in replies) / len(replies) if replies else float("nan"),
        traffic.up,
        traffic.down,
        tuple(refused),
        notes=notes,
    )
    return _evaluated(protocol, engine, schedule, replies, result)


def _broadcast(protocol: Protocol, progress: Progress, round: int) -> bytes:
    groups = {"": {**progress.x, **progress.buffers}, **protocol.algorithm.broadcast(progress.server)}
    state = pack(groups)
    guard(state, protocol.program.private)
    generator = torch_numbers(protocol.seed, "link-down", round) if protocol.link.down == "int8" else None
    return encode(state, protocol.header(round), protocol.link.down, generator)


def _admit(
    protocol: Protocol, schedule: Schedule, reply: Reply, sent: State, round: int
) -> tuple[Update, State]:
    assert reply.message is not None
    changes = change_coded(protocol.link)
    header, state = admit(
        reply.message,
        spec=protocol.up,
        round=round,
        method=protocol.algorithm.name,
        scheme=protocol.program.scheme,
        max_norm=schedule.max_norm,
        reference=None if changes else sent,
    )
    if header.sender != f"client:{reply.client}":
        raise UpdateRejected(f"a message of {header.sender} in the name of client {reply.client}.")
    groups = unpack(state)
    model = groups.pop("")
    if changes:
        model = add({name: sent[name] for name in model}, model)
    program = protocol.program
    y = {name: model[name] for name in program.shared}
    averaged = {name: model[name] for name in program.shared_buffers}
    return Update(y, groups, header.examples), averaged


def _evaluated(
    protocol: Protocol, engine: Engine, schedule: Schedule, replies: list[Reply], result: Round
) -> Round:
    """Personal models: the mean over the cohort's clients of each one's accuracy on its own test data."""
    if not schedule.evaluates(result.number):
        return result
    before = [reply.before.accuracy for reply in replies if reply.before and reply.before.examples]
    after = [reply.after.accuracy for reply in replies if reply.after and reply.after.examples]
    if before and after:
        accuracy = sum(after) / len(after)
        result = replace(result, before=sum(before) / len(before), after=accuracy, accuracy=accuracy)
    if not protocol.program.private:
        score = engine.evaluate({**result.progress.x, **result.progress.buffers})
        if score is not None:
            result = replace(result, accuracy=score.accuracy, loss=score.loss)
    return result
