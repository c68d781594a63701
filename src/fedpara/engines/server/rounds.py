"""The server's loop, the same over every engine: broadcast, collect, check, aggregate, evaluate.

    for t = 1 .. T:  S = cohort(t);  message = make_message(x, extras);  replies = engine.train(S, message)
                     x, server = aggregate(the updates that pass the checks)

Each update is added to the round's mean as soon as it passes, in the cohort's order, and then freed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch

from fedpara.engines.client import Reply
from fedpara.engines.differences import begin, known_after
from fedpara.engines.participation.cohorts import LOST
from fedpara.engines.progress import Progress, Round, Schedule
from fedpara.engines.server.broadcast import broadcast
from fedpara.engines.server.collect import Collected, collect
from fedpara.engines.server.engine import Engine
from fedpara.engines.server.folds import begun, folds_after
from fedpara.engines.server.levels import in_groups
from fedpara.engines.server.private import budget_notes, spent_after
from fedpara.engines.server.scores import evaluated, with_everyone
from fedpara.engines.session import Session
from fedpara.engines.transfer import move
from fedpara.errors import RunError
from fedpara.privacy import User
from fedpara.state import State, device_of, finite
from fedpara.wire import Message, Meter


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
            progress = result.progress
            result = replace(result, progress=progress.on_host())
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
        progress = progress if _stays(session, schedule) else result.progress
        scores += schedule.evaluated(result)


def _stays(session: Session, schedule: Schedule) -> bool:
    """Whether the model may stay on the device that aggregated it.

    The features listed here keep state on the host, so with them it may not.
    """
    differences = session.differences and session.link.downlink.grid is None
    others = (differences, session.folding, schedule.levels, schedule.guard, schedule.secure)
    return not any(others) and not isinstance(session.privacy, User)


def _round(session: Session, engine: Engine, schedule: Schedule, personal: bool, progress: Progress) -> Round:
    t, progress = progress.round + 1, begun(session, progress)
    cohorts = schedule.cohorts(session.cohort_seed)
    chosen = cohorts.draw(t)
    lost = [client for client in chosen if cohorts.loses(t, client)]
    meter, scored = Meter(), personal and schedule.evaluates(t)
    collected, message = _ask(session, engine, schedule, progress, chosen, lost, meter, scored)
    x, server, averages, count = progress.x, progress.server, progress.buffers, len(collected.replies)
    error = None
    private = collected.aggregator is not None and isinstance(session.privacy, User)
    if private:
        _refuse_divergence(t, collected)
    # Add the noise even if nobody replied: an unchanged model would reveal that.
    if collected.aggregator is not None and (count >= schedule.minimum or private):
        x, server, averages = collected.aggregator.aggregate(server, schedule.clients, t)
        resting = {name: progress.x[name] for name in session.resting(t)}
        x |= move(resting, device_of([x]))  # copied, because a mean of equal numbers may round
        error = collected.aggregator.error
        _refuse_overflow(t, [x, averages, *server.values()])
    else:
        _refuse_divergence(t, collected)
        few = f"{count} of {schedule.minimum} usable updates" if count else "no usable update"
        collected.notes.append(f"round {t} had {few if chosen else 'no clients'}: the model stays unchanged")
        collected.replies.clear()
    collected.notes += budget_notes(schedule, t)
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
            known=known_after(message, [reply.client for reply in collected.replies]) if message else None,
            folds=folds_after(progress, [reply.client for reply in collected.replies]),
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
        aggregation_error=error,
        privacy=spent_after(schedule, progress.server, t),
    )
    return evaluated(session, engine, schedule, collected.replies if scored else [], result)


def _ask(
    session: Session,
    engine: Engine,
    schedule: Schedule,
    progress: Progress,
    chosen: Sequence[int],
    lost: Sequence[int],
    meter: Meter,
    scored: bool,
) -> tuple[Collected, Message | None]:
    """(what the cohort sent, the server's last message to it)"""
    t, levels, message = progress.round + 1, schedule.levels, None
    if schedule.secure is not None:
        from fedpara.engines.secure.collect import SecureRound  # it needs an extra

        message, sent = broadcast(session, progress, t)
        begin(message, chosen)
        secure = SecureRound(session, schedule, progress, message, meter)
        return secure.collect(engine, chosen, lost, sent, scored), message
    found = []
    given = progress if levels is None else levels.ordered(progress)
    for own, part, some in in_groups(session, schedule, given, chosen):
        message, sent = broadcast(own, part, t)
        begin(message, some)
        here = [client for client in some if client not in lost]
        replies = chain(
            engine.train(t, here, message, scored) if here else (),
            (Reply(client, reason=LOST) for client in some if client in lost),
        )
        found.append(collect(own, schedule, part, some, message, sent, replies, meter))
    return found[0] if levels is None else levels.joined(given.x, found), message


def _refuse_divergence(round: int, collected: Collected) -> None:
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
