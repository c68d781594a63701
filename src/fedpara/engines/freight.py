"""Freight: states between host and device in one copy a type, where a copy a tensor would wait on each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedpara.layout import by_type, cut, flat
from fedpara.state import State


def bring(state: State, device: torch.device) -> State:
    """The state on the device. On the host it is the state itself."""
    if device.type == "cpu":
        return dict(state)
    there: State = {}
    for names in by_type(state):
        there |= cut(flat(state, names).to(device), state, names)
    return {name: there[name] for name in state}


def bring_all(states: Sequence[State], device: torch.device) -> State:
    """States of one kind, stacked as [client, ...] on the device."""
    first, there = states[0], State()
    for names in by_type(first):
        there |= cut(torch.stack([flat(state, names) for state in states]).to(device), first, names)
    return {name: there[name] for name in first}


def fetch(stacked: State) -> list[State]:
    """From [client, ...] on the device, one state a client on the host."""
    if not stacked:
        return []
    count = len(next(iter(stacked.values())))
    one = {name: tensor[0] for name, tensor in stacked.items()}
    clients: list[State] = [{} for _ in range(count)]
    for names in by_type(stacked):
        rows = _to_host(torch.cat([stacked[name].reshape(count, -1) for name in names], dim=1))
        for client, row in zip(clients, rows, strict=True):
            client |= cut(row, one, names)
    return [{name: client[name] for name in stacked} for client in clients]


def _to_host(whole: Tensor) -> Tensor:
    if whole.device.type == "cpu":
        return whole
    return torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole)
