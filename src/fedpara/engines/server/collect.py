"""Collects a round's replies: meters, checks and aggregates each one as it arrives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from fedpara.algorithms import Update, Variables
from fedpara.engines.client import Reply, sends_changes
from fedpara.engines.differences import bytes_to
from fedpara.engines.progress import Progress, Schedule
from fedpara.engines.server.aggregation import Aggregator, round_weights
from fedpara.engines.server.private import PrivateSum, private_sum
from fedpara.engines.server.products import AggregationError
from fedpara.engines.session import Session
from fedpara.engines.threads import checked_in_order
from fedpara.engines.transfer import HOST, move
from fedpara.errors import UpdateRejected, WireError
from fedpara.layout import together
from fedpara.state import State, device_of
from fedpara.wire import Header, Message, Meter, admit, unpack
from fedpara.wire.check import admit_row
from fedpara.wire.rows import RowMessage
from fedpara.wire.tensors import side_by_side

LARGE_MESSAGE = 1 << 20  # bytes; threads speed up hashing and copying above this, and slow it down below


class Aggregates(Protocol):
    """Makes the next model from a round's updates, as `Aggregator` does."""

    error: AggregationError | None

    def aggregate(self, server: Variables, clients: int, round: int) -> tuple[State, Variables, State]: ...


@dataclass
class Collected:
    """A round's results. `replies` are those with accepted updates, without their messages."""

    aggregator: Aggregates | None = None
    replies: list[Reply] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diverged: list[tuple[int, str]] = field(default_factory=list)  # also in `refused`
    seconds: float = 0.0  # simulated


def collect(
    session: Session,
    schedule: Schedule,
    progress: Progress,
    chosen: Sequence[int],
    message: Message,
    sent: State,
    replies: Iterable[Reply],
    meter: Meter,
) -> Collected:
    """Collects at most one update per client of the cohort, even if the engine or the network returns more."""
    round = progress.round + 1
    aggregator: Aggregator | PrivateSum | None = private_sum(session, schedule, progress, round)
    collected = Collected(aggregator)
    waiting, devices = dict.fromkeys(chosen), schedule.devices
    changed = sends_changes(session.link) or session.link.downlink.text != "float32"
    reads = changed or schedule.max_norm is not None or bool(session.rotation or session.recycling)
    here = device_of([progress.x]).type
    whole = not reads and aggregator is None  # updates are added as they arrived
    known = {here: (progress.x, sent)}  # by the device of the updates
    if changed:  # joined once, because each update is added to them
        known = {here: (side_by_side(progress.x), side_by_side(sent))}

    def verdict_on(reply: Reply) -> tuple[Update, State] | RowMessage | WireError | None:
        if reply.message is None:
            return None
        device = reply.message.device if isinstance(reply.message, Message) else HOST
        if reads and device.type not in known:
            known[device.type] = move(known[here][0], device), move(known[here][1], device)
        try:
            if whole and isinstance(reply.message, RowMessage):
                return _admit_row(session, schedule, reply.client, reply.message, round)
            return _admit(session, schedule, reply, *known.get(device.type, known[here]), progress)
        except WireError as error:
            return error

    for reply, verdict in checked_in_order(replies, verdict_on, is_large):
        meter.up(round, reply.client, reply.unread if reply.message is None else reply.message)
        if reply.late:
            collected.notes.append(
                f"round {round}: client {reply.client}'s reply to round {reply.late} came too late and is refused"
            )
            continue
        if reply.client not in waiting:
            collected.notes.append(
                f"client {reply.client} replied twice or was not asked: that reply is dropped"
            )
            continue
        del waiting[reply.client]
        if reply.reached:
            meter.down(round, reply.client, bytes_to(message, reply.client))
        if reply.message is None:
            collected.refused.append((reply.client, reply.reason))
            collected.diverged += [(reply.client, reply.reason)] if reply.diverged else []
            continue
        if isinstance(verdict, WireError):
            collected.refused.append((reply.client, str(verdict)))
            continue
        assert verdict is not None
        if devices is not None:
            steps = session.algorithm.local.of(reply.client).steps_for(schedule.examples(reply.client))
            transfers = bytes_to(message, reply.client), len(reply.message)
            waited, late = devices.wait(session.seed, reply.client, steps, *transfers)
            collected.seconds = max(collected.seconds, waited)
            if late:
                collected.refused.append((reply.client, late))
                continue
        if aggregator is None:
            counts = {client: schedule.examples(client) for client in chosen}
            weights, notes = round_weights(counts, schedule.weights, schedule.max_share)
            collected.notes += [f"round {round}: {note}" for note in notes]
            aggregator = Aggregator(
                session.algorithm,
                progress.x,
                weights,
                schedule.guard,
                buffers=progress.buffers,
                products=schedule.products,
            )
            collected.aggregator = aggregator
        if isinstance(verdict, RowMessage):
            assert isinstance(aggregator, Aggregator)
            aggregator.add_row(reply.client, verdict, schedule.examples(reply.client), reply.loss)
        else:
            aggregator.add(reply.client, *verdict)
        collected.replies.append(replace(reply, message=None))
    for client in waiting:
        meter.down(round, client, bytes_to(message, client))
        collected.refused.append((client, "it sent no reply"))
    return collected


def is_large(reply: Reply) -> bool:
    return isinstance(reply.message, bytes) and len(reply.message) >= LARGE_MESSAGE


def _admit_row(
    session: Session, schedule: Schedule, client: int, message: RowMessage, round: int
) -> RowMessage:
    header = admit_row(
        message,
        spec=session.up,
        round=round,
        method=session.algorithm.name,
        scheme=session.program.scheme,
        examples=schedule.examples(client),
    )
    _check_sender(header, client)
    return message


def _check_sender(header: Header, client: int) -> None:
    if header.sender != f"client:{client}":
        raise UpdateRejected(f"client {client} sent a message that names {header.sender} as its sender.")


def _admit(
    session: Session, schedule: Schedule, reply: Reply, x: State, sent: State, progress: Progress
) -> tuple[Update, State]:
    assert reply.message is not None
    round = progress.round + 1
    unsent = session.unsent(round, progress.server)
    changes = sends_changes(session.link)
    header, state = admit(
        reply.message,
        spec=session.up_in(round, progress.server),
        round=round,
        method=session.algorithm.name,
        scheme=session.program.scheme,
        link=session.link.up,
        examples=schedule.examples(reply.client),
        max_norm=schedule.max_norm,
        reference={name: sent[name] for name in session.exact} if changes else sent,
        exact=session.exact,
    )
    _check_sender(header, reply.client)
    variables = unpack(state)
    model = variables.pop("")
    program, rounded = session.program, session.link.downlink.text != "float32"

    def moved(part: Tensor, x: Tensor, sent: Tensor) -> Tensor:
        """y, or x + (y - x^) in its place: downlink rounding is not mistaken for client progress."""
        if not rounded:
            return sent + part
        d = (sent + part).sub_(sent) if changes else part - sent
        return d.add_(x) if x.dtype == d.dtype else x + d

    y = {name: model[name] for name in program.shared if name in model}
    if changes or rounded:
        y = together(moved, y, x, sent)
    resting = {name: sent[name] for name in unsent}
    if resting and rounded:
        resting = together(lambda sent, x: x + (sent - sent), resting, x)
    y = {name: y[name] if name in y else resting[name] for name in program.shared}
    averaged = {name: model[name] for name in program.shared_buffers}
    return Update(y, variables, header.examples, loss=reply.loss), averaged
