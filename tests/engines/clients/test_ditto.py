"""Contract of personal models: they stay with the client, leave the server's model alone, and are scored."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.algorithms import Personal
from fedpara.engines.batched.budget import _lane_bytes, cannot_wait
from fedpara.engines.memory import InMemory
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import PERSONAL, PRIVATE
from fedpara.errors import ConfigError, RunError
from fedpara.state import nbytes, norm, subtract
from fedpara.wire import decode


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def everybody(world, algorithm, engine="sequential", model=None, **options):
    options = {"rounds": 2, "cohort": 6, "federation": world.personal, "engine": engine, **options}
    return world.simulate(model or world.model(), algorithm, **options)


def ditto(lambda_=0.1, *given, **fields):
    return algorithms.ditto(lambda_, *given, **{"lr": 0.05, "batch_size": 4, **fields})


def test_the_server_sees_fedavg(world, engine):
    """Same model, same bytes in the messages apart from the name, same global scores."""
    sent, results = {}, {}
    for algorithm in (world.algorithm("fedavg"), ditto()):
        session = world.session(world.model(), algorithm)
        seen = world.engine(engine, session, InMemory(), world.personal)
        results[algorithm.name] = list(
            run_rounds(session, seen, Schedule(3, 6, 4, world.personal.size), personal=True)
        )
        sent[algorithm.name] = [decode(reply.message)[1] for replies in seen.up for reply in replies]
    assert all(same(a, b) for a, b in zip(sent["fedavg"], sent["ditto"], strict=True))
    a, b = (results[name][-1] for name in ("fedavg", "ditto"))
    assert same(a.progress.x, b.progress.x)
    assert (a.scores, a.train_loss) == (b.scores, b.train_loss)
    assert a.after != b.after


def test_lambda_0_is_each_client_training_alone(world, engine):
    alone = everybody(world, world.algorithm(), engine, share="none")
    mine = everybody(world, ditto(0.0), engine)
    for client in range(6):
        for name, tensor in alone.client_state(client).items():
            torch.testing.assert_close(mine.client_state(client)[name], tensor, rtol=0, atol=1e-6)


def test_a_larger_lambda_keeps_the_personal_models_closer(world, engine):
    def distance(lambda_):
        run = everybody(world, ditto(lambda_), engine, rounds=3)
        return sum(norm(subtract(run.client_state(k), run.state)) for k in range(6))

    assert distance(5.0) < distance(0.5) < distance(0.0)


def test_scores_are_the_personal_models(world, engine):
    first, both = (everybody(world, ditto(epochs=3), engine, rounds=rounds) for rounds in (1, 2))
    assert both.rounds[0].after == both.rounds[1].before, "a personal model changes only on its client"
    assert both.rounds[1].before == pytest.approx(first.rounds[-1].everyone.score, abs=1e-12)
    assert both.rounds[1].after == pytest.approx(both.rounds[-1].everyone.score, abs=1e-12)
    assert both.accuracy != both.rounds[1].after


def test_a_client_that_never_took_part_has_the_servers_model(world, engine):
    run = everybody(world, ditto(), engine, cohort=2)
    absent = next(k for k in range(6) if all(k not in r.cohort for r in run.rounds))
    assert same(run.client_state(absent), run.state)


def batch_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize("scheme", ["original", "pfedpara"])
def test_a_personal_model_is_whole_and_has_its_own_statistics(world, engine, scheme):
    memory = InMemory()
    model = world.model(scheme, batch_norm)
    run = everybody(
        world, ditto(batch_size=3, steps=2), engine, model, memory=memory, federation=world.federation
    )
    program = run.session.program
    for client in range(6):
        own = memory.get(client)[PERSONAL]
        assert own.keys() == {*program.parameters, *program.buffers}
        assert own["2.num_batches_tracked"] == 4
        assert not torch.equal(own["2.running_mean"], run.state["2.running_mean"])
        assert all(not torch.equal(own[name], t) for name, t in memory.get(client)[PRIVATE].items())


def test_the_trainings_have_the_same_batches_and_dropout(world, engine):
    """With lambda 0, one round and nothing private, the personal model is the one that the client sends."""
    noisy = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))
    session = world.session(world.model("original", lambda: noisy), ditto(0.0))
    memory = InMemory()
    seen = world.engine(engine, session, memory)
    list(run_rounds(session, seen, Schedule(1, 6, 6, world.federation.size), personal=False))
    for reply in seen.up[0]:
        assert same(decode(reply.message)[1], memory.get(reply.client)[PERSONAL])


def test_crops_are_the_same_in_both_trainings(world, engine):
    task = fp.Task(world.model(), test=world.test, augment="crop-flip")
    federation = fp.FederatedData(world.train, [range(12)])
    run = fp.simulate(task, federation, ditto(0.0), rounds=1, cohort=1, engine=engine)
    assert same(run.client_state(0), run.state)


def test_a_personal_model_that_diverges_is_not_kept(world, engine):
    memory = InMemory()
    with pytest.raises(RunError, match=r"it diverged: its personal model's (loss|parameters)"):
        everybody(world, ditto(1e30, epochs=5), engine, memory=memory, rounds=5)
    assert all(t.isfinite().all() for k in range(6) for t in (memory.get(k) or {}).get(PERSONAL, {}).values())


def test_a_custom_second_objective_reads_the_clients_variables(world, engine):
    """SCAFFOLD's control variates also correct the personal model."""
    base = world.algorithm("scaffold")
    mine = replace(base, name="both", personal=Personal(base.correct))
    run = everybody(world, mine, engine)
    plain = everybody(world, base, engine)
    assert same(run.state, plain.state)
    assert not same(run.client_state(0), plain.client_state(0))


def test_a_personal_correct_unlike_the_gradient_is_rejected(world):
    bad = replace(ditto(), personal=Personal(lambda *_: {}))
    with pytest.raises(ConfigError, match=r"algorithm 'ditto': personal\.correct returned nothing for"):
        everybody(world, bad)


def test_memory_limits_count_the_second_training(world, monkeypatch):
    plain, mine = (world.session(world.model(), a) for a in (world.algorithm(), ditto()))
    model = nbytes(plain.program.initial)
    assert _lane_bytes(mine) - _lane_bytes(plain) == (5 + 3) * model
    for states, fits in ((3, (True, False)), (7, (True, False)), (8, (True, True))):
        # Half of the memory: three copies of each trained state, and two of the personal model in the client's memory.
        monkeypatch.setattr(
            "fedpara.engines.batched.budget.memory_of", lambda device, n=states: 2 * 10 * n * model
        )
        assert fits == tuple(not cannot_wait(one, torch.device("cpu"), 10) for one in (plain, mine))
