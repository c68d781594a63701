"""Contracts of FederatedData: each client's examples, and lazy federations."""

from collections.abc import Sequence

import pytest
import torch

from fedpara.data import Examples, FederatedData, Partition, split
from fedpara.errors import ConfigError, DataError

TRAIN = Examples(torch.arange(6, dtype=torch.uint8).view(6, 1), torch.tensor([0, 1, 0, 1, 0, 1]), 2)
TEST = Examples(torch.arange(10, 14, dtype=torch.uint8).view(4, 1), torch.tensor([0, 0, 1, 1]), 2)
CLIENTS = Partition.of([[0, 2], [1], []])


class Lazy(Sequence):
    """A million clients that are computed on demand; iterating over them fails."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, i):
        return [i % 6, (i + 1) % 6]

    def __iter__(self):
        raise AssertionError("the federation was iterated over")


def test_a_client_holds_its_examples():
    data = FederatedData(TRAIN, CLIENTS)
    assert len(data) == 3
    assert [data.size(i) for i in range(3)] == [2, 1, 0]
    assert data.client(0).inputs.flatten().tolist() == [0, 2]
    assert data.client(0).targets.tolist() == [0, 0]
    assert len(data.client(2)) == 0


def test_a_lazy_federation_is_only_indexed():
    data = FederatedData(TRAIN, Lazy(), test_clients=Lazy())
    assert len(data) == 1_000_000
    assert data.client(999_999).inputs.flatten().tolist() == [3, 4]
    assert data.size(5) == 2
    assert data.client_test(6).inputs.flatten().tolist() == [0, 1]


def test_personal_test_data_comes_from_either_field():
    held_out = FederatedData(TRAIN, CLIENTS, test_clients=[[4], [3], [5]])
    assert held_out.has_personal
    assert held_out.client_test(1).inputs.flatten().tolist() == [3]
    personal = FederatedData(TRAIN, CLIENTS, personal=(TEST, [[0, 1], [2, 3], []]))
    assert personal.has_personal
    assert personal.client_test(1).inputs.flatten().tolist() == [12, 13]


def test_a_missing_test_set_is_an_error():
    data = FederatedData(TRAIN, CLIENTS)
    assert not data.has_personal
    with pytest.raises(ConfigError, match="test_clients or personal"):
        data.client_test(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"test_clients": [[0]]}, "test data for 1 clients: expected 3"),
        ({"personal": (TEST, [[0]] * 4)}, "test data for 4 clients"),
        ({"test_clients": [[0]] * 3, "personal": (TEST, [[0]] * 3)}, "both set"),
    ],
)
def test_parts_that_do_not_fit_are_rejected(change, words):
    with pytest.raises(ConfigError, match=words):
        FederatedData(**({"train": TRAIN, "clients": CLIENTS} | change))


def test_an_index_past_the_examples_is_named():
    with pytest.raises(DataError, match="0 to 6: expected 0 to 5"):
        FederatedData(TRAIN, [[0, 6]]).client(0)


def test_pairs_and_lists_of_indices_work_in_place_of_examples_and_a_partition():
    x, y = torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    kept, held = split([[0, 2, 4], [1, 3, 5]], y, 0.3, seed=0)
    data = FederatedData((x, y), kept, test_clients=held, test=(x, y))
    assert sorted([*data.indices(1), *held[1]]) == [1, 3, 5]
    assert torch.equal(data.client_test(1).inputs, x[held[1].tolist()])
