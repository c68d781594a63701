"""A round's cost depends on its cohort, not on the federation. The tests count operations, not seconds."""

from collections.abc import Sequence

import pytest
import torch

import fedpara as fp
from fedpara.engines.memory import InMemory


class Lazy(Sequence):
    """A federation that is never stored in memory. It counts how often it is read."""

    def __init__(self, clients: int, examples: int) -> None:
        self.clients, self.examples, self.looks = clients, examples, 0

    def __len__(self):
        return self.clients

    def __getitem__(self, client):
        if not 0 <= client < self.clients:
            raise IndexError(client)
        self.looks += 1
        start = client * 7 % (self.examples - 6)
        return range(start, start + 6)

    def __iter__(self):
        raise AssertionError("someone walks through the whole federation")


def run(world, clients, algorithm="scaffold", scheme="pfedpara", **options):
    lazy = Lazy(clients, len(world.train))
    memory = InMemory()
    options = {"rounds": 3, "cohort": 20, **options}
    result = world.simulate(
        world.model(scheme),
        world.algorithm(algorithm),
        federation=fp.FederatedData(world.train, lazy),
        memory=memory,
        **options,
    )
    return result, lazy, memory


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "feddyn", "ditto"])
def test_a_million_clients_cost_as_much_as_a_thousand(world, algorithm):
    few, few_looks, few_memory = run(world, 1_000, algorithm)
    many, many_looks, many_memory = run(world, 1_000_000, algorithm)
    assert many_looks.looks == few_looks.looks <= 3 * 20 * 4
    assert many.bytes == pytest.approx(few.bytes, rel=1e-3)  # client numbers have more digits
    assert len(few_memory) <= 60
    assert len(many_memory) == len({k for result in many.rounds for k in result.cohort}) <= 60


def test_clients_that_never_took_part_have_no_memory(world):
    result, _, memory = run(world, 1_000_000)
    taken = {client for r in result.rounds for client in r.cohort}
    assert all(memory.get(client) is not None for client in taken)
    assert memory.get(next(k for k in range(100) if k not in taken)) is None
    assert all(torch.equal(result.client_state(7)[n], t) for n, t in result.state.items())


def test_clients_without_variables_use_no_memory(world):
    _, _, memory = run(world, 1_000_000, "fedavg", "fedpara")
    assert len(memory) == 0


def test_cohorts_cover_the_whole_range_of_a_large_federation(world):
    result, _, _ = run(world, 1_000_000, "fedavg", "original", rounds=5)
    asked = [client for r in result.rounds for client in r.cohort]
    assert min(asked) < 100_000
    assert max(asked) > 900_000
    assert len(set(asked)) > 95


def test_a_client_memory_does_not_keep_its_cohorts_tensors_alive():
    cohort = torch.randn(1000, 10)
    memory = InMemory()
    memory.put(3, 1, {"private": {"w": cohort[3]}})
    kept = memory.get(3)["private"]["w"]
    assert torch.equal(kept, cohort[3])
    assert kept.untyped_storage().nbytes() == 40


@pytest.mark.parametrize("sizes", [[4 + 2 * i for i in range(10)], [100, 4, 4, 4, 88, 5, 6]])
def test_cohorts_of_any_size_that_are_read_client_by_client(sizes):
    """A cohort's batches and pool of examples may be smaller than those of an earlier one."""

    def read(client):
        x = torch.randn(sizes[client], 8, generator=torch.Generator().manual_seed(client))
        return x, x[:, :3].argmax(1)

    def state(engine):
        torch.manual_seed(0)
        task = fp.Task(torch.nn.Linear(8, 3))
        federation = fp.FederatedData.of(read, clients=len(sizes), sizes=sizes, test=read(3))
        return fp.simulate(
            task,
            federation,
            fp.algorithms.fedavg(lr=0.1),
            rounds=8,
            cohort=5,
            engine=engine,
            device="cpu",
        ).state

    sequential, batched = state("sequential"), state("batched")
    for name, expected in sequential.items():
        torch.testing.assert_close(batched[name], expected)
