"""The server's loop, the same over every engine: broadcast, collect, check, aggregate, evaluate.

    for t = 1 .. T:  S = cohort(t);  message = make_message(x, extras);  replies = engine.train(S, message)
                     x, server = aggregate(the updates that pass the checks)

Each update is added to the round's mean as soon as it passes, in the cohort's order, and then freed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch

from fedpara.algorithms import Update
from fedpara.engines.aggregation import Aggregator, round_weights
from fedpara.engines.client import Reply, from_change, sends_changes
from fedpara.engines.participation.cohorts import LOST
from fedpara.engines.participation.fairness import fairness_of, mean_of
from fedpara.engines.progress import Everyone, Progress, Round, Schedule
from fedpara.engines.rng import final_sample, torch_rng
from fedpara.engines.session import Session
from fedpara.engines.threads import checked_in_order
from fedpara.engines.transfer import HOST, device_of, move
from fedpara.errors import RunError, UpdateRejected, WireError
from fedpara.state import State, finite
from fedpara.tasks import Score
from fedpara.wire import Message, Meter, admit, guard, make_message, pack, unpack

MAX_SCORED = 1000
"""At the end of a run at most this many clients are scored; a larger federation is sampled."""
LARGE_MESSAGE = 1 << 20  # bytes; threads speed up hashing and copying above this, and slow it down below


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str:
        """How the clients run, and what was not possible and why."""

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterable[Reply]:
        """One reply per client, in the cohort's order."""

    def commit(self, round: int, clients: Sequence[int]) -> None:
        """The server accepted these clients' updates: their new memories now count, all others are dropped."""

    def evaluate(self, state: State) -> Score | None: ...

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterable[Reply]:
        """Each client's own model (the shared part from `message`, its private part from memory) on its test data.

        Nothing trains and no memory changes. The score is `Reply.before`; a reply without one states the reason.
        """


def initial_progress(session: Session) -> Progress:
    program = session.program
    x = program.start(program.shared)
    return Progress(0, x, program.start(program.shared_buffers), session.algorithm.server_init(x))


def run_rounds(
    session: Session,
    engine: Engine,
    schedule: Schedule,
    personal: bool,
    start: Progress | None = None,
    past: Sequence[float] = (),
) -> Iterator[Round]:
    """One result per round, from `start` on. `past`: what `Schedule.evaluated` gave in the rounds before."""
    progress, scores = start or initial_progress(session), list(past)
    while progress.round < schedule.rounds:
        try:
            result = _round(session, engine, schedule, personal, progress)
            ended = schedule.ends(result, scores)
            if ended and personal:
                result = with_everyone(session, engine, schedule, result)
        except torch.OutOfMemoryError:
            raise RunError(
                f"round {progress.round + 1}: the device is out of memory while aggregating or scoring. The state "
                "before this round is kept. Use a smaller batch or cohort, or the sequential engine."
            ) from None
        yield result
        if ended:
            return
        progress = result.progress
        scores += schedule.evaluated(result)


def _round(session: Session, engine: Engine, schedule: Schedule, personal: bool, progress: Progress) -> Round:
    t = progress.round + 1
    cohorts = schedule.cohorts(session.seed)
    chosen = cohorts.draw(t)
    lost = [client for client in chosen if cohorts.loses(t, client)]
    present = [client for client in chosen if client not in lost]
    message, sent = _broadcast(session, progress, t)
    meter, scored = Meter(), personal and schedule.evaluates(t)
    replies = chain(
        engine.train(t, present, message, scored) if present else (),
        (Reply(client, reason=LOST) for client in lost),
    )
    collected = _collect(session, schedule, progress, chosen, message, sent, replies, meter)
    x, server, averages, count = progress.x, progress.server, progress.buffers, len(collected.replies)
    if collected.aggregator is not None and count >= schedule.minimum:
        x, server, averages = collected.aggregator.aggregate(server, schedule.clients)
        _refuse_overflow(t, [x, averages, *server.values()])
    else:
        _refuse_divergence(t, collected)
        few = f"{count} of {schedule.minimum} usable updates" if count else "no usable update"
        collected.notes.append(f"round {t} had {few if chosen else 'no clients'}: the model stays unchanged")
        collected.replies.clear()
    collected.aggregator = None  # frees GPU memory for scoring
    engine.commit(t, [reply.client for reply in collected.replies])
    up, down = meter.total_up, meter.total_down
    devices = schedule.devices
    result = Round(
        replace(
            progress,
            round=t,
            x=x,
            buffers=averages,
            server=server,
            bytes_up=progress.bytes_up + up,
            bytes_down=progress.bytes_down + down,
            clock=devices.clock(progress.clock, collected.seconds, bool(lost)) if devices else None,
        ),
        tuple(chosen),
        sum(reply.loss for reply in collected.replies) / len(collected.replies)
        if collected.replies
        else float("nan"),
        up,
        down,
        tuple(collected.refused),
        notes=tuple(collected.notes),
        memories=tuple(reply.client for reply in collected.replies) if session.stateful else (),
        primary=schedule.primary,
    )
    return _evaluated(session, engine, schedule, collected.replies if scored else [], result)


@dataclass
class _Collected:
    """A round's results. `replies` are those with accepted updates, without their messages."""

    aggregator: Aggregator | None = None
    replies: list[Reply] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diverged: list[tuple[int, str]] = field(default_factory=list)  # also in `refused`
    seconds: float = 0.0  # simulated


def _collect(
    session: Session,
    schedule: Schedule,
    progress: Progress,
    chosen: Sequence[int],
    message: Message,
    sent: State,
    replies: Iterable[Reply],
    meter: Meter,
) -> _Collected:
    """Collects at most one update per client of the cohort, even if the engine or the network returns more."""
    collected, round = _Collected(), progress.round + 1
    waiting, devices = dict.fromkeys(chosen), schedule.devices
    known = {HOST.type: sent}  # the model as it was sent, on each device that holds an update

    def verdict_on(reply: Reply) -> tuple[Update, State] | WireError | None:
        if reply.message is None:
            return None
        device = device_of([reply.message.tensors]) if isinstance(reply.message, Message) else HOST
        if schedule.max_norm is not None and device.type not in known:
            known[device.type] = move(sent, device)
        try:
            return _admit(session, schedule, reply, known.get(device.type, sent), round)
        except WireError as error:
            return error

    for reply, verdict in checked_in_order(replies, verdict_on, _is_large):
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
            meter.down(round, reply.client, message)
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
            transfers = len(message), len(reply.message)
            waited, late = devices.wait(session.seed, reply.client, steps, *transfers)
            collected.seconds = max(collected.seconds, waited)
            if late:
                collected.refused.append((reply.client, late))
                continue
        if collected.aggregator is None:
            counts = {client: schedule.examples(client) for client in chosen}
            weights, notes = round_weights(counts, schedule.weights, schedule.max_share)
            collected.notes += [f"round {round}: {note}" for note in notes]
            collected.aggregator = Aggregator(session.algorithm, progress.x, weights)
        update, buffers = verdict
        if session.link.down != "float32":
            update = _without_rounding(update, progress.x, sent)
        collected.aggregator.add(reply.client, update, buffers)
        collected.replies.append(replace(reply, message=None))
    for client in waiting:
        meter.down(round, client, message)
        collected.refused.append((client, "it sent no reply"))
    return collected


def _is_large(reply: Reply) -> bool:
    return isinstance(reply.message, bytes) and len(reply.message) >= LARGE_MESSAGE


def _refuse_divergence(round: int, collected: _Collected) -> None:
    """RunError if clients diverged and no update is left: the next round would do the same."""
    if collected.diverged and not collected.replies:
        client, reason = collected.diverged[0]
        raise RunError(
            f"round {round}: no update is left, and {len(collected.diverged)} of {len(collected.refused)} clients "
            f"diverged (client {client}: {reason}). The state before this round is kept. Lower the learning rate, or "
            "set a gradient clip."
        )


def _refuse_overflow(round: int, states: Iterable[State]) -> None:
    """RunError before anything is saved: the sum or squares of finite updates can overflow."""
    if not all(finite(state) for state in states):
        raise RunError(
            f"round {round}: the aggregated model or the server's variables hold NaN or infinity. The state before "
            "this round is kept. Lower the learning rates, or bound the updates with max_norm."
        )


def _broadcast(session: Session, progress: Progress, round: int) -> tuple[Message, State]:
    """(the message, the model as the clients will read it: a lossy link changes it)"""
    model = {**progress.x, **progress.buffers}
    state = pack({"": model, **session.algorithm.broadcast(progress.server)})
    guard(state, session.program.private)
    generator = torch_rng(session.seed, "link-down", round) if session.link.down == "int8" else None
    try:
        if not finite(state):
            raise UpdateRejected("it holds NaN or infinity.")
        message = make_message(state, session.header(round), session.link.down, generator, session.exact)
        exact = session.link.down == "float32"
        return message, model if exact else session.read_down(message, round)[0]
    except UpdateRejected as error:
        raise RunError(
            f"the model cannot be sent in round {round}: {error} The state before this round is kept."
        ) from None


def _admit(
    session: Session, schedule: Schedule, reply: Reply, sent: State, round: int
) -> tuple[Update, State]:
    assert reply.message is not None
    changes = sends_changes(session.link)
    header, state = admit(
        reply.message,
        spec=session.up,
        round=round,
        method=session.algorithm.name,
        scheme=session.program.scheme,
        link=session.link.up,
        examples=schedule.examples(reply.client),
        max_norm=schedule.max_norm,
        reference={name: sent[name] for name in session.exact} if changes else sent,
        exact=session.exact,
    )
    if header.sender != f"client:{reply.client}":
        raise UpdateRejected(
            f"client {reply.client} sent a message that names {header.sender} as its sender."
        )
    variables = unpack(state)
    model = variables.pop("")
    if changes:
        model = from_change(model, sent, session.exact)
    program = session.program
    y = {name: model[name] for name in program.shared}
    averaged = {name: model[name] for name in program.shared_buffers}
    return Update(y, variables, header.examples), averaged


def _without_rounding(update: Update, x: State, sent: State) -> Update:
    """x + (y - x^) in place of y: downlink rounding is not mistaken for client progress."""
    return replace(update, y={name: x[name] + (y - sent[name]) for name, y in update.y.items()})


def _evaluated(
    session: Session, engine: Engine, schedule: Schedule, replies: list[Reply], result: Round
) -> Round:
    """The result with its scores. Personal scores are means over the cohort's clients."""
    if not schedule.evaluates(result.number):
        return result
    primary = schedule.primary
    before = [reply.before.values for reply in replies if reply.before and reply.before.examples]
    after = [reply.after.values for reply in replies if reply.after and reply.after.examples]
    if before and after:
        means = {name: mean_of(after, name) for name in after[0] if name != "loss" or primary == "loss"}
        result = replace(result, before=mean_of(before, primary), after=means[primary], scores=means)
        worst, deviation = fairness_of([v[primary] for v in after], schedule.higher_is_better)
        result = replace(result, worst_tenth=worst, spread=deviation)
    if not session.program.private:
        score = engine.evaluate({**result.progress.x, **result.progress.buffers})
        if score is not None:
            result = replace(result, scores=score.values)
    return result


def with_everyone(session: Session, engine: Engine, schedule: Schedule, result: Round) -> Round:
    """The result with the score of all clients, after the last aggregation."""
    n = schedule.clients
    chosen = list(range(n)) if n <= MAX_SCORED else final_sample(session.seed, n, MAX_SCORED)
    message, _ = _broadcast(session, result.progress, result.number + 1)
    replies = list(engine.score_clients(result.number + 1, chosen, message))
    scored = {
        reply.client: reply.before.values[schedule.primary]
        for reply in replies
        if reply.before and reply.before.examples
    }
    missing = [reply for reply in replies if reply.before is None]
    notes = [
        f"{len(missing)} of {len(chosen)} clients were not scored at the end; client {reply.client}: {reply.reason}"
        for reply in missing[:1]
    ]
    if not scored:
        return replace(result, notes=(*result.notes, *notes))
    sent = len(message) * sum(reply.reached for reply in replies)
    scores = list(scored.values())
    fairness, mean = fairness_of(scores, schedule.higher_is_better), sum(scores) / len(scores)
    everyone = Everyone(mean, len(scores), n, sent, *fairness, by_client=scored)
    return replace(result, everyone=everyone, notes=(*result.notes, *notes))
