"""At the end of a run every client's own model is scored, after the last aggregation and without training."""

import pytest
import torch

import fedpara as fp
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import make_program
from fedpara.engines.server import scores


@pytest.mark.parametrize("share", ["all", "fedper", "none"])
@pytest.mark.parametrize("scheme", ["original", "pfedpara"])
def test_everyone_is_scored_with_the_final_model(world, engine, scheme, share):
    run = world.simulate(world.model(scheme), federation=world.personal, engine=engine, share=share)
    first, last = run.rounds
    assert first.everyone is None
    everyone = last.everyone
    assert (everyone.clients, everyone.of) == (6, 6)
    judge = Worker(make_program(world.model(scheme)), fp.Task(world.model(scheme)))
    scores = [
        judge.evaluate(run.client_state(i), world.personal.client_test(i)).values["accuracy"]
        for i in range(6)
    ]
    assert everyone.score == pytest.approx(sum(scores) / 6)
    assert everyone.bytes_down >= 6 * sum(t.numel() * 4 for t in last.progress.x.values())
    assert len(last.cohort) == 3, "the round's scores cover only its cohort"


def test_the_final_score_adds_no_bytes_to_a_round_and_changes_nothing(world, engine):
    scored = world.simulate(world.model("pfedpara"), federation=world.personal, engine=engine)
    plain = world.simulate(world.model("pfedpara"), federation=world.personal, engine=engine, personal=False)
    assert scored.bytes == plain.bytes
    assert plain.rounds[-1].everyone is None
    for name, tensor in plain.state.items():
        assert torch.equal(scored.state[name], tensor)


def test_a_large_federation_is_sampled_and_the_sample_size_is_reported(world, engine, monkeypatch):
    monkeypatch.setattr(scores, "MAX_SCORED", 4)
    runs = [world.simulate(world.model(), federation=world.personal, engine=engine) for _ in range(2)]
    assert (runs[0].rounds[-1].everyone.clients, runs[0].rounds[-1].everyone.of) == (4, 6)
    assert runs[0].rounds[-1].everyone == runs[1].rounds[-1].everyone, "the seed decides the sample"


def test_a_run_that_reaches_its_target_ends_with_everyones_score(world, engine):
    run = world.simulate(
        world.model(), federation=world.personal, engine=engine, rounds=9, target=0.01, evaluate_every=2
    )
    assert len(run.rounds) < 9
    assert run.rounds[-1].everyone is not None
