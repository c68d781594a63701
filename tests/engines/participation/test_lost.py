"""Lost clients: they receive the model and send nothing."""

import pytest
import torch

from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import LOST, Cohorts


def test_clients_are_lost_independently_of_the_cohort():
    """30% of 20,000 draws, within five standard deviations, and the same for a client in every cohort."""
    lost = [Cohorts(0, 10, 3, lost=0.3).loses(t, i) for t in range(2_000) for i in range(10)]
    assert abs(sum(lost) - 6_000) < 5 * (20_000 * 0.3 * 0.7) ** 0.5
    wide = Cohorts(0, 10, 9, lost=0.3)
    assert lost == [wide.loses(t, i) for t in range(2_000) for i in range(10)]
    assert not any(Cohorts(0, 10, 3).loses(t, 0) for t in range(100))


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_lost_clients_are_the_same_on_every_engine(world, algorithm):
    runs = [
        world.simulate(
            world.model("pfedpara"), world.algorithm(algorithm), rounds=6, cohort=4, engine=engine, lost=0.4
        )
        for engine in ("sequential", "batched")
    ]
    refused = [[result.refused for result in run.rounds] for run in runs]
    assert refused[0] == refused[1]
    assert any(refused[0])
    assert {reason for result in refused[0] for _, reason in result} == {LOST}
    for name, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[name], rtol=1e-5, atol=1e-6)


def test_a_lost_client_costs_bytes_down_and_none_up(world, engine):
    kept, lossy = (
        world.simulate(world.model(), rounds=6, cohort=4, engine=engine, lost=lost) for lost in (0.0, 0.4)
    )
    for a, b in zip(kept.rounds, lossy.rounds, strict=True):
        assert a.cohort == b.cohort
        assert a.bytes_down == b.bytes_down
        assert b.bytes_up == pytest.approx(a.bytes_up * (4 - len(b.refused)) / 4, rel=1e-3)  # headers vary


def test_a_lost_client_keeps_its_memory(world, engine):
    memory = InMemory()
    expected: dict[int, int] = {}

    class Watched:
        def get(self, client):
            return memory.get(client)

        def put(self, client, round, variables):
            expected[client] = round
            memory.put(client, round, variables)

    run = world.simulate(
        world.model(),
        world.algorithm("scaffold"),
        rounds=6,
        cohort=4,
        engine=engine,
        lost=0.4,
        memory=Watched(),
    )
    last = {}
    for result in run.rounds:
        lost = {client for client, _ in result.refused}
        last |= {client: result.number for client in result.cohort if client not in lost}
        assert set(result.memories) == set(result.cohort) - lost
    assert expected == last
    assert any(result.refused for result in run.rounds)


def test_a_round_that_loses_everyone_keeps_the_model(world, engine):
    run = world.simulate(world.model(), rounds=4, cohort=2, engine=engine, lost=0.9)
    empty = [result for result in run.rounds if len(result.refused) == 2]
    assert empty
    assert f"round {empty[0].number} had no usable update: the model stays unchanged" in empty[0].notes
