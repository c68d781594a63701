"""LaneState: what clients bring into their lanes, and what they leave with."""

import pytest
import torch

from fedpara.engines.batched.lane_state import LaneState, lanes_of
from fedpara.engines.session import PRIVATE

LANES = 4
HOST = torch.device("cpu")


def lane_state():
    def room(*shape):
        return torch.zeros(LANES, *shape)

    return LaneState(
        parameters={"a": room(3), "b": room(2, 2)},
        slots={},
        buffers={},
        own={"h": {"a": room(3)}},
        x={},
        down={},
        beside={},
        entered={},
        losses=torch.arange(4.0),
        first_slots={},
        scale=None,
        feed=None,
    )


@pytest.mark.parametrize("lanes", [[0, 1, 2, 3], [1, 2], [2], [3, 1]])
def test_clients_enter_and_leave_in_their_order(lanes):
    state, index = lane_state(), lanes_of(lanes, HOST)
    memories = [
        {PRIVATE: {"b": torch.full((2, 2), 10.0 + i)}, "h": {"a": torch.full((3,), 20.0 + i)}}
        for i in range(len(lanes))
    ]
    state.enter(index, {"a": torch.arange(3.0)}, memories)
    assert state.losses.tolist() == [0.0 if lane in lanes else lane for lane in range(LANES)]
    left, losses = state.leave(index, with_slots=False, last=True)
    assert losses.tolist() == [0.0] * len(lanes)
    for i, lane in enumerate(lanes):
        assert left["a"][i].tolist() == [0.0, 1.0, 2.0]
        assert torch.equal(left["b"][i], memories[i][PRIVATE]["b"])
        assert torch.equal(state.own["h"]["a"][lane], memories[i]["h"]["a"])
    for lane in set(range(LANES)) - set(lanes):
        assert not state.parameters["a"][lane].any()
        assert not state.own["h"]["a"][lane].any()


@pytest.mark.parametrize("lanes", [[1, 2], [3, 1]])
def test_what_left_stays_when_others_enter(lanes):
    state = lane_state()
    index = lanes_of(lanes, HOST)
    left, losses = state.leave(index, with_slots=False, last=False)
    state.parameters["a"].fill_(5.0)
    state.losses.fill_(5.0)
    assert not left["a"].any()
    assert losses.tolist() == [float(lane) for lane in lanes]


def test_lanes_side_by_side_are_a_slice():
    assert lanes_of([1, 2, 3], HOST) == slice(1, 4)
    assert torch.equal(lanes_of([1, 3], HOST), torch.tensor([1, 3]))
    assert lanes_of([], HOST).tolist() == []
