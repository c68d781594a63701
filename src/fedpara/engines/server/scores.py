"""The scores of a round: of the server's model, of the cohort's models, and of all clients at the end.

A client's primary score may be NaN or infinite, such as an r2 of equal targets. Such a client is left out of the means,
and a note of the round tells it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fedpara.engines.client import Reply
from fedpara.engines.differences import bytes_to
from fedpara.engines.participation.fairness import fairness_of, mean_of
from fedpara.engines.progress import Everyone, Round, Schedule
from fedpara.engines.rng import final_sample
from fedpara.engines.server.broadcast import broadcast
from fedpara.engines.server.engine import Engine
from fedpara.engines.server.folds import begun
from fedpara.engines.session import Session
from fedpara.tasks import Score

MAX_SCORED = 1000
"""At the end of a run at most this many clients are scored; a larger federation is sampled."""


def evaluated(
    session: Session, engine: Engine, schedule: Schedule, replies: list[Reply], result: Round
) -> Round:
    """The result with its scores. Personal scores are means over the cohort's clients."""
    if not schedule.evaluates(result.number):
        return result
    primary = schedule.primary
    before, _ = _usable(_measured((reply.client, reply.before) for reply in replies), primary)
    after, notes = _usable(_measured((reply.client, reply.after) for reply in replies), primary)
    result = replace(result, notes=(*result.notes, *notes))
    if before and after:
        scores = list(after.values())
        means = {name: mean_of(scores, name) for name in scores[0] if name != "loss" or primary == "loss"}
        first = mean_of(list(before.values()), primary)
        result = replace(result, before=first, after=means[primary], scores=means)
        worst, deviation = fairness_of([own[primary] for own in scores], schedule.higher_is_better)
        result = replace(result, worst_tenth=worst, spread=deviation)
    if not session.program.local:
        score = engine.evaluate(result.progress.model)
        if score is not None:
            probed = schedule.guard.probe(result.progress) if schedule.guard is not None else {}
            result = replace(result, scores={**score.values, **probed})
    return result


def with_everyone(session: Session, engine: Engine, schedule: Schedule, result: Round) -> Round:
    """The result with the score of all clients, after the last aggregation."""
    n = schedule.clients
    chosen = list(range(n)) if n <= MAX_SCORED else final_sample(session.seed, n, MAX_SCORED)
    message, _ = broadcast(session, begun(session, result.progress), result.number + 1)
    replies = list(engine.score_clients(result.number + 1, chosen, message))
    measured = _measured((reply.client, reply.before) for reply in replies)
    usable, left_out = _usable(measured, schedule.primary)
    missing = [reply for reply in replies if reply.before is None]
    notes = left_out + [
        f"{len(missing)} of {len(chosen)} clients were not scored at the end; client {reply.client}: {reply.reason}"
        for reply in missing[:1]
    ]
    if not usable:
        return replace(result, notes=(*result.notes, *notes))
    sent = sum(bytes_to(message, reply.client) for reply in replies if reply.reached)
    scores = [values[schedule.primary] for values in usable.values()]
    fairness, mean = fairness_of(scores, schedule.higher_is_better), sum(scores) / len(scores)
    everyone = Everyone(mean, len(scores), n, sent, *fairness, by_client=measured)
    return replace(result, everyone=everyone, notes=(*result.notes, *notes))


def _measured(scores: Iterable[tuple[int, Score | None]]) -> dict[int, Score]:
    """The scores of the clients that have test examples."""
    return {client: score for client, score in scores if score is not None and score.examples}


def _usable(measured: Mapping[int, Score], primary: str) -> tuple[dict[int, Mapping[str, float]], list[str]]:
    """(the values of every client whose primary one is a finite number, a note on the others)"""
    usable = {client: s.values for client, s in measured.items() if math.isfinite(s.values[primary])}
    others = [client for client in measured if client not in usable]
    if not others:
        return usable, []
    value = measured[others[0]].values[primary]
    return usable, [
        f"{len(others)} of {len(measured)} clients have no finite {primary} and are left out of its mean; client "
        f"{others[0]} has {value}"
    ]
