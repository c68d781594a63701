"""Runs that end early: by patience, by a target in either direction, and by `on_round`."""

import numpy as np
import pytest

from fedpara.engines.progress import Progress, Round, Schedule
from fedpara.errors import ConfigError


def played(scores, schedule, done=0):
    """The round in which a run with these scores ends; `done` rounds ran before."""
    past = []
    for number, score in enumerate(scores, 1):
        result = Round(
            Progress(number, {}, {}, {}), (), 0.0, 0, 0, scores={} if score is None else {"accuracy": score}
        )
        if number > done and schedule.ends(result, past):
            return number
        past += schedule.evaluated(result)
    return len(scores)


def stops(scores, patience, higher=True, every=1):
    """The same rule, from the definition: no score of the last `patience` is better than the best before them."""
    best, since = None, 0
    for number, score in enumerate(scores, 1):
        if number % every or score is None or not np.isfinite(score):
            continue
        if best is None or (score > best if higher else score < best):
            best, since = score, 0
        else:
            since += 1
        if since >= patience:
            return number
    return len(scores)


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("patience", [1, 2, 3, 7])
def test_patience_stops_when_the_best_score_is_old(patience, higher):
    generator = np.random.default_rng(patience)
    for every in (1, 2, 3):
        scores = [
            round(float(s), 1) if t % every == 0 else None for t, s in enumerate(generator.random(40), 1)
        ]
        schedule = Schedule(
            40, 1, 1, lambda i: 1, evaluate_every=every, patience=patience, higher_is_better=higher
        )
        assert played(scores, schedule) == stops(scores, patience, higher, every)


def test_a_score_that_is_not_finite_is_no_evaluation():
    schedule = Schedule(9, 1, 1, lambda i: 1, patience=2)
    assert played([float("nan"), 0.5, float("nan"), 0.4, 0.5, 0.9], schedule) == 5


def test_the_extra_evaluation_of_a_last_round_does_not_count():
    """A run of 3 rounds, evaluated every 2, is scored in round 3. Prolonged, it ends like one of 40."""
    scores = [None, 0.5, 0.9, 0.4, None, 0.6, None, 0.5, None, 0.5]
    short, long = (Schedule(rounds, 1, 1, lambda i: 1, evaluate_every=2, patience=2) for rounds in (3, 40))
    assert played(scores, short) == 3
    assert played([*scores[:2], None, *scores[3:]], long) == 10
    assert played(scores, long, done=3) == 10


def test_a_target_follows_the_direction_of_the_score():
    for higher, scores in ((True, [0.1, 0.5, 0.8]), (False, [0.8, 0.5, 0.1])):
        schedule = Schedule(9, 1, 1, lambda i: 1, target=0.5, higher_is_better=higher)
        assert played(scores, schedule) == 2


def test_a_run_stops_by_patience(world, engine):
    still = world.algorithm(lr=1e-9)  # the accuracy stays the same
    run = world.simulate(world.model(), still, rounds=20, patience=3, engine=engine)
    assert len(run.rounds) == 4


def test_everyone_is_scored_when_patience_ends_a_run(world, engine):
    run = world.simulate(
        world.model(),
        world.algorithm(lr=1e-9),
        federation=world.personal,
        rounds=20,
        patience=1,
        engine=engine,
    )
    assert len(run.rounds) == 2
    assert run.rounds[-1].everyone is not None


def test_patience_needs_a_score(world):
    federation = world.federation
    with pytest.raises(ConfigError, match="a patience of 2 needs test data to be measured on"):
        world.simulate(world.model("pfedpara"), federation=federation, patience=2)
    with pytest.raises(ConfigError, match="patience is 0: expected a whole number of 1 or more"):
        world.simulate(world.model(), patience=0)


@pytest.mark.parametrize("answer", [False, np.bool_(False)])
def test_on_round_ends_a_run_by_returning_false(world, engine, answer):
    run = world.simulate(
        world.model(),
        federation=world.personal,
        rounds=9,
        engine=engine,
        on_round=lambda result: answer if result.number == 2 else True,
    )
    assert len(run.rounds) == 2
    assert run.rounds[-1].everyone is not None, "the run is over, so every client is scored"
    assert run.progress.x


@pytest.mark.parametrize("answer", [None, 0, "", [], True])
def test_any_other_answer_of_on_round_goes_on(world, answer):
    assert len(world.simulate(world.model(), rounds=3, on_round=lambda result: answer).rounds) == 3
