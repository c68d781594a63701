"""InMemory: each client's memory is one block per type, and keeps no larger block allocated."""

import torch

from fedpara.engines.memory import InMemory
from fedpara.layout import cut, runs

LIKE = {"b": torch.zeros(2, 2), "a": torch.zeros(3)}


def kept(state):
    memory = InMemory()
    memory.put(3, 1, {"h": state, "private": {}})
    found = memory.get(3)
    assert found["private"] == {}
    assert list(found["h"]) == list(state)
    assert all(torch.equal(found["h"][name], tensor) for name, tensor in state.items())
    assert len(runs([found["h"][name] for name in sorted(state)])) == 1
    return found["h"]


def test_a_block_of_its_own_is_not_copied():
    block = torch.arange(7.0)
    assert kept(cut(block, LIKE, sorted(LIKE)))["a"].data_ptr() == block.data_ptr()


def test_a_row_of_a_cohort_is_copied():
    rows = torch.arange(21.0).view(3, 7)
    assert kept(cut(rows[0], LIKE, sorted(LIKE)))["a"].untyped_storage().nbytes() == rows[0].nbytes


def test_separate_tensors_become_neighbours():
    kept({name: torch.randn(like.shape) for name, like in LIKE.items()})
