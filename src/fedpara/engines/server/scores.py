"""The scores of a round: of the server's model, of the cohort's models, and of all clients at the end."""

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

MAX_SCORED = 1000
"""At the end of a run at most this many clients are scored; a larger federation is sampled."""


def evaluated(
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
    sent = sum(bytes_to(message, reply.client) for reply in replies if reply.reached)
    scores = list(scored.values())
    fairness, mean = fairness_of(scores, schedule.higher_is_better), sum(scores) / len(scores)
    everyone = Everyone(mean, len(scores), n, sent, *fairness, by_client=scored)
    return replace(result, everyone=everyone, notes=(*result.notes, *notes))
