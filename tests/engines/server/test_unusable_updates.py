"""Contract: clients that diverge, have no examples or exceed a limit do not stop the others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.errors import ConfigError, RunError
from fedpara.state import norm

BAD = Cohorts(0, 6, 4).draw(1)[1]


def test_a_client_without_examples_is_skipped(world):
    clients = [*world.clients[:2], range(0), *world.clients[3:]]
    run = world.simulate(
        world.model(),
        world.algorithm("scaffold"),
        federation=fp.FederatedData(world.train, clients),
        cohort=6,
    )
    assert [result.refused for result in run.rounds] == [((2, "it holds no examples"),)] * 2
    assert run.memory.get(2) is None


def test_a_federation_without_examples_learns_nothing_and_notes_it(world):
    run = world.simulate(world.model(), federation=fp.FederatedData(world.train, [range(0)] * 6))
    assert all(torch.equal(run.state[n], t) for n, t in run.session.program.initial.items())
    assert all("no usable update" in result.notes[0] for result in run.rounds)


def test_a_client_with_fewer_examples_than_a_batch_takes_one_step(world):
    federation = fp.FederatedData(world.train, [range(3)] * 6)
    small = world.simulate(world.model(), world.algorithm(batch_size=64), federation=federation)
    exact = world.simulate(world.model(), world.algorithm(batch_size=3), federation=federation)
    assert all(torch.equal(small.state[name], exact.state[name]) for name in exact.state)
    assert not any(result.refused for result in small.rounds)


@pytest.mark.parametrize("scheme", ["original", "fedpara", "pfedpara"])
def test_a_diverging_run_stops_and_names_the_client_and_the_round(world, scheme):
    memory, seen = InMemory(), []
    every = r"round \d+: no update is left, and \d+ of \d+ clients diverged \(client \d+: it diverged: its "
    with pytest.raises(RunError, match=every):
        world.simulate(
            world.model(scheme),
            world.algorithm("scaffold", lr=3e38, epochs=3),
            rounds=50,
            memory=memory,
            on_round=seen.append,
        )
    assert all(tensor.isfinite().all() for result in seen for tensor in result.progress.x.values())
    taken = {client for result in seen for client in result.memories}
    assert {client for client in range(6) if memory.get(client) is not None} == taken


@pytest.mark.parametrize("name", ["sequential", "batched"])
def test_one_diverging_client_is_refused_and_the_round_continues(world, name):
    """Its examples are far out of range. The others continue, and its memory stays unchanged."""
    inputs = world.train.inputs.float() / 255
    inputs[world.clients[BAD].start : world.clients[BAD].stop] = 1e30
    federation = fp.FederatedData(replace(world.train, inputs=inputs, mean=None, std=None), world.clients)
    memory = InMemory()
    run = world.simulate(
        world.model(),
        world.algorithm("scaffold"),
        federation=federation,
        cohort=6,
        engine=name,
        memory=memory,
    )
    for result in run.rounds:
        assert [client for client, _ in result.refused] == [BAD]
        assert result.refused[0][1].startswith("it diverged: its ")
        assert result.memories == tuple(client for client in range(6) if client != BAD)
    assert memory.get(BAD) is None
    assert all(tensor.isfinite().all() for tensor in run.state.values())


def test_a_last_step_to_infinity_counts_as_diverged(world):
    """The loss is measured before the step: it is finite when the parameters no longer are."""
    with pytest.raises(RunError, match="client 0: it diverged: its parameters are no longer finite"):
        world.simulate(
            world.model(),
            world.algorithm(lr=3e38, weight_decay=1e3, batch_size=12),
            federation=fp.FederatedData(world.train, [range(12)]),
            cohort=1,
        )


def test_a_change_too_large_for_the_uplink_is_refused_and_the_run_continues(world):
    run = world.simulate(
        world.model(), world.algorithm(lr=1e6, batch_size=16), link=fp.Link(up="float16"), rounds=2
    )
    for result in run.rounds:
        assert len(result.refused) == 3
        assert all("to be sent as float16" in reason for _, reason in result.refused)
        assert result.bytes_up == 0


def test_a_model_too_large_for_the_downlink_stops_the_run(world):
    with pytest.raises(RunError, match=r"cannot be sent in round 2: .* to be sent as float16"):
        world.simulate(world.model(), world.algorithm(lr=1e6, batch_size=16), link=fp.Link(down="float16"))


def test_a_max_norm_that_no_update_meets_is_reported_in_every_round(world):
    run = world.simulate(world.model(), max_norm=1e-9)
    assert [len(result.refused) for result in run.rounds] == [3, 3]
    with pytest.raises(ConfigError, match="max_norm"):
        world.simulate(world.model(), max_norm=-1.0)


def test_a_model_with_nan_does_not_start(world):
    model = world.model()
    with torch.no_grad():
        model.fc1.bias[3] = float("nan")
    with pytest.raises(ConfigError, match="the loss of the first example is nan, before any training"):
        world.simulate(model)


def test_a_model_with_nan_is_not_sent(world):
    model = world.model()
    model.register_parameter("unused", nn.Parameter(torch.full((3,), torch.nan)))
    with pytest.raises(RunError, match="the model cannot be sent in round 1: it holds NaN or infinity"):
        world.simulate(model)


@pytest.mark.parametrize("up", ["float32", "float16"])
def test_max_norm_limits_the_change_on_every_uplink(world, up):
    run = world.simulate(world.model(), max_norm=1.0, link=fp.Link(up=up))
    assert norm(run.session.program.initial) > 2
    assert [result.refused for result in run.rounds] == [(), ()]


@pytest.mark.parametrize("up", ["float32", "float16"])
def test_running_statistics_count_by_their_change_in_max_norm(world, up):
    def network():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 10))

    run = world.simulate(
        world.model(network=network), world.algorithm(steps=1), rounds=1, max_norm=8.0, link=fp.Link(up=up)
    )
    assert run.rounds[0].refused == ()  # counted in full, 256 variances of 1 would have norm 16
