"""Contracts of a federation that is read client by client, on both engines."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedpara as fp
from fedpara import algorithms
from fedpara.errors import ConfigError, DataError

ENGINES = ("sequential", "batched")
SIZES = (9, 12, 8, 16, 11)


def held(client):
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(SIZES[client], 3, generator=generator)
    return x, x.sum(1)


class Rows(Dataset):
    """Client's examples item by item; `broken` is the item that raises."""

    def __init__(self, client, broken=None, width=3):
        self.x, self.y = held(client)
        self.broken, self.width = broken, width

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if i == self.broken:
            raise ValueError(f"row {i} is damaged")
        return self.x[i][: self.width], self.y[i]


def network():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def simulate(data, engine="sequential", **options):
    options = {"rounds": 3, "cohort": 5, **options}
    task = fp.Task(network(), loss="mse", test=held(0))
    return fp.simulate(task, data, algorithms.fedavg(lr=0.05, batch_size=4), engine=engine, **options)


def same(a, b):
    return all(torch.equal(tensor, b.state[name]) for name, tensor in a.state.items())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cohort", [2, 5])
def test_reading_client_by_client_gives_the_bits_of_data_in_memory(engine, cohort):
    whole = simulate(fp.FederatedData.of([held(i) for i in range(5)]), engine, cohort=cohort)
    assert whole.engine.startswith(engine)
    for data in (
        fp.FederatedData.of([Rows(i) for i in range(5)]),
        fp.FederatedData.of(held, clients=5),
        fp.FederatedData.of(held, clients=5, sizes=SIZES),
    ):
        assert not data.pooled
        assert same(simulate(data, engine, cohort=cohort), whole)


def test_engines_agree():
    runs = [simulate(fp.FederatedData.of(held, clients=5), engine) for engine in ENGINES]
    for name, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[name], rtol=1e-5, atol=1e-6)


def test_a_client_is_read_when_it_is_in_a_cohort_and_stated_sizes_are_trusted():
    read = []

    def load(client):
        read.append(client)
        return held(client)

    data = fp.FederatedData.of(load, clients=5, sizes=SIZES)
    assert data.sizes.tolist() == [*SIZES]
    assert read == [0]
    run = simulate(data, rounds=2, cohort=2)
    assert sorted(read[1:]) == sorted(client for r in run.rounds for client in r.cohort)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("broken", [0, 3])
def test_a_data_set_that_raises_refuses_its_client_and_the_round_goes_on(engine, broken):
    data = fp.FederatedData.of([Rows(i, broken=4 if i == broken else None) for i in range(5)])
    run = simulate(data, engine)
    reason = "its data could not be read: ValueError: row 4 is damaged"
    assert [r.refused for r in run.rounds] == [((broken, reason),)] * 3
    rest = fp.FederatedData.of([Rows(i) if i != broken else Rows(i, broken=0) for i in range(5)])
    assert same(run, simulate(rest, engine))
    assert run.rounds[-1].scores["loss"] < run.rounds[0].scores["loss"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_that_raises_or_gives_nothing_refuses_its_client(engine):
    def load(client):
        if client == 2:
            raise FileNotFoundError("site 2 is down")
        return [] if client == 4 else held(client)

    refused = dict(simulate(fp.FederatedData.of(load, clients=5), engine, rounds=1).rounds[0].refused)
    assert refused.keys() == {2, 4}
    assert "FileNotFoundError: site 2 is down" in refused[2]
    assert "empty" in refused[4]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x[:, :2], y), r"float32 \[1, 2\].* the first client's are float32 \[1, 3\]"),
        (lambda x, y: (x.double(), y), r"float64 \[1, 3\]"),
        (lambda x, y: ({"x": x}, y), r"\{x: float32 \[1, 3\]\}"),
        (lambda x, y: (x, y[:-1]), r"targets are float32 \[11\]: expected 12 rows"),
    ],
    ids=["shape", "type", "structure", "rows"],
)
def test_a_client_whose_examples_differ_is_refused(engine, change, words):
    def load(client):
        return change(*held(client)) if client == 1 else held(client)

    [(client, reason)] = simulate(fp.FederatedData.of(load, clients=5), engine, rounds=1).rounds[0].refused
    assert client == 1
    assert re.search(words, reason), reason


def pad_to_the_longest(items):
    longest = max(len(x) for x, _ in items)
    x = torch.stack([torch.nn.functional.pad(x, (0, longest - len(x))) for x, _ in items])
    return x, torch.stack([y for _, y in items])


def test_a_collate_that_changes_its_shapes_between_the_first_clients_is_an_error_at_once():
    sources = [Rows(0), Rows(1, width=2), Rows(2)]
    with pytest.raises(ConfigError, match=r"client 1 .*let `collate` always pad to the same length"):
        fp.FederatedData.of(sources, collate=pad_to_the_longest)


def test_a_collate_that_changes_its_shapes_at_each_call_is_an_error_at_once():
    widths = iter(range(4, 9))

    def pad_more(items):
        width = next(widths)
        return torch.zeros(len(items), width), torch.zeros(len(items))

    with pytest.raises(
        ConfigError, match=r"client 0 .*float32 \[1, 5\].* first client's are float32 \[1, 4\]"
    ):
        fp.FederatedData.of([Rows(i) for i in range(5)], collate=pad_more)


def test_a_client_that_collate_pads_to_another_length_is_refused():
    sources = [Rows(0), Rows(1, broken=0), Rows(2, width=2)]
    data = fp.FederatedData.of(sources, collate=pad_to_the_longest)
    refused = dict(simulate(data, cohort=3, rounds=1).rounds[0].refused)
    assert refused.keys() == {1, 2}
    assert "row 0 is damaged" in refused[1]
    assert "let `collate` always pad to the same length" in refused[2]


def test_a_collate_that_loses_examples_is_an_error_at_once():
    with pytest.raises(
        ConfigError, match="no client's data could be read: it holds 8 examples: 9 were stated"
    ):
        fp.FederatedData.of([Rows(0)], collate=lambda items: pad_to_the_longest(items[1:]))


def test_data_in_memory_that_differs_is_an_error_at_once():
    x, y = held(1)
    with pytest.raises(
        DataError, match=r"client 1's examples are float32 \[1, 2\].*client 0's are float32 \[1, 3\]"
    ):
        fp.FederatedData.of([held(0), (x[:, :2], y)])


def test_data_in_memory_that_cannot_be_read_names_its_client():
    x, y = held(1)
    with pytest.raises(DataError, match=r"client 1's data could not be read: targets are float32 \[11\]"):
        fp.FederatedData.of([held(0), (x, y[:-1])])


def test_a_client_with_another_number_of_examples_than_stated_is_refused():
    data = fp.FederatedData.of(held, clients=5, sizes=(9, 12, 8, 7, 11))
    [(client, reason)] = simulate(data, rounds=1).rounds[0].refused
    assert (client, "holds 16 examples: 7 were stated" in reason) == (3, True)


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_are_scored_on_their_own_test_data(engine):
    data = fp.FederatedData.of(held, clients=5, tests=[held(i) for i in range(5)])
    run = fp.simulate(
        fp.Task(network(), loss="mse"),
        data,
        algorithms.fedavg(lr=0.05),
        rounds=2,
        cohort=5,
        engine=engine,
    )
    assert run.rounds[-1].after < run.rounds[0].before


def test_test_data_that_cannot_be_read_names_its_client():
    def tests(client):
        return held(client) if client < 3 else held(99)

    data = fp.FederatedData.of(held, clients=5, tests=tests)
    with pytest.raises(DataError, match="client 3's test data could not be read: IndexError"):
        data.client_test(3)


def test_test_data_of_the_federation_that_cannot_be_read_says_so():
    with pytest.raises(DataError, match="the test data could not be read: ValueError: row 4 is damaged"):
        fp.FederatedData.of([Rows(0)], test=Rows(1, broken=4))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("give the number of `clients`", {"sources": held}),
        ("sizes of 2 clients: expected 5", {"sources": held, "clients": 5, "sizes": (1, 2)}),
        ("no client's data could be read: ValueError: row 0", {"sources": [Rows(i, 0) for i in range(3)]}),
        ("no client holds an example", {"sources": held, "clients": 2, "sizes": (0, 0)}),
        ("no sources", {"sources": []}),
        ("sources is a dict: clients have numbers", {"sources": {"a": held}}),
        ("tests of 2 clients: expected 5", {"sources": held, "clients": 5, "tests": [held, held]}),
    ],
)
def test_a_federation_that_cannot_be_read_is_one_sentence(words, options):
    with pytest.raises(ConfigError, match=words):
        fp.FederatedData.of(**options)


def test_a_memory_map_is_copied_one_client_at_a_time(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((50, 3), np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = fp.FederatedData.of([(mapped[i * 10 : i * 10 + 10], np.zeros(10, np.float32)) for i in range(5)])
    assert not data.pooled
    assert data.client(3).inputs.shape == (10, 3)
    assert len(data.train) <= 10
