"""Scores per client: the mean, the worst tenth, the spread, the worst client and the quantiles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedpara as fp
from fedpara.engines.local.worker import Worker
from fedpara.engines.participation.fairness import Distribution, spread, worst_tenth
from fedpara.engines.program import make_program


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_they_equal_numpys(scores):
    tenth = int(np.ceil(len(scores) / 10))
    assert worst_tenth(scores) == pytest.approx(np.sort(scores)[:tenth].mean())
    assert worst_tenth(scores, higher_is_better=False) == pytest.approx(np.sort(scores)[-tenth:].mean())
    assert spread(scores) == pytest.approx(np.std(scores), abs=1e-9)


def test_a_distribution_by_hand():
    scores = {7: 0.2, 3: 0.2, 9: math.nan, 4: 0.6, 5: 1.0, 6: 0.5}
    high, low, own = (Distribution.of(scores, better) for better in (True, False, None))
    assert (high.clients, high.worst, high.worst_client) == (5, 0.2, 3), "client 9 has no score"
    assert (low.worst, low.worst_client) == (1.0, 5)
    assert (own.worst, own.worst_client) == (None, None)
    for one in (high, low, own):
        assert (one.q10, one.q50, one.q90, one.mean) == pytest.approx((0.2, 0.5, 0.84, 0.5))
    assert Distribution.of({1: math.nan}, True) is None


@pytest.mark.parametrize("scheme", ["original", "pfedpara"])
def test_everyone_has_the_score_of_each_client(world, engine, scheme):
    run = world.simulate(world.model(scheme), federation=world.personal, engine=engine, rounds=3)
    judge = Worker(make_program(world.model(scheme)), fp.Task(world.model(scheme)))
    own = [judge.evaluate(run.client_state(i), world.personal.client_test(i)) for i in range(6)]
    scores = [score.values["accuracy"] for score in own]
    everyone = run.everyone
    assert list(everyone.by_client) == [0, 1, 2, 3, 4, 5]
    for score, theirs in zip(everyone.by_client.values(), own, strict=True):
        assert score.examples == theirs.examples == 2
        assert score.values == pytest.approx(theirs.values)
        assert score.values["accuracy"] == theirs.values["accuracy"]
    assert everyone.score == pytest.approx(np.mean(scores))
    assert everyone.worst_tenth == min(scores)
    assert everyone.spread == pytest.approx(np.std(scores))


def test_a_round_has_the_spread_of_its_cohort(world, engine):
    run = world.simulate(world.model("pfedpara"), federation=world.personal, engine=engine, evaluate_every=2)
    first, second = run.rounds
    assert (first.worst_tenth, first.spread) == (None, None)
    assert 0 <= second.worst_tenth <= second.after
    assert second.spread >= 0
    alone = world.simulate(world.model(), federation=world.personal, engine=engine, cohort=1).rounds[-1]
    assert (alone.worst_tenth, alone.spread) == (alone.after, 0.0)


def test_a_client_without_a_finite_score_is_left_out_of_the_means(engine):
    """The r2 of equal targets is NaN."""

    def part(count, spread):
        x = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
        return x, spread * x.sum(1, keepdim=True)

    tests = [part(6, 1.0), part(7, 0.0), part(8, 1.0)]
    federation = fp.FederatedData.of([part(10, 1.0)] * 3, test=part(9, 1.0), tests=tests)
    task = fp.Task(nn.Linear(3, 1), loss="mse", metrics=["r2"])
    run = fp.simulate(
        task, federation, fp.algorithms.fedavg(lr=0.1), rounds=1, cohort=3, device="cpu", engine=engine
    )
    (result,) = run.rounds
    assert result.everyone.clients == 2
    shown = run.everyone.by_client
    assert [(shown[i].examples, np.isfinite(shown[i].values["r2"])) for i in range(3)] == [
        (6, True),
        (7, False),
        (8, True),
    ]
    assert np.isfinite([score.values["loss"] for score in shown.values()]).all()
    assert np.isfinite([result.before, result.after, result.spread, result.everyone.score]).all()
    said = "1 of 3 clients have no finite r2 and are left out of its mean; client 1 has nan"
    assert result.notes == (said, said)
