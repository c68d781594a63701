"""Freight: states between host and device in one copy a type, where a copy a tensor would wait on each."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedpara.algorithms import Variables
from fedpara.layout import by_type, cut, flat
from fedpara.state import State

HOST = torch.device("cpu")


def device_of(states: Iterable[State]) -> torch.device:
    """Where they are, by the first tensor there is."""
    return next((tensor.device for state in states for tensor in state.values()), HOST)


def move(state: Mapping[str, Tensor], device: torch.device) -> State:
    """The state on the device, or on the host; the same tensors where it is there already."""
    there = {name: tensor for name, tensor in state.items() if tensor.device.type == device.type}
    rest = {name: tensor for name, tensor in state.items() if name not in there}
    for names in by_type(rest):
        there |= cut(flat(rest, names).to(device), rest, names)
    return {name: there[name] for name in state}


def move_variables(groups: Variables, device: torch.device) -> Variables:
    return {group: move(state, device) for group, state in groups.items()}


def stack_on(states: Sequence[State], device: torch.device) -> State:
    """States of one kind, stacked as [client, ...] on the device."""
    first, there = states[0], State()
    for names in by_type(first):
        there |= cut(torch.stack([flat(state, names) for state in states]).to(device), first, names)
    return {name: there[name] for name in first}


def fetch(stacked: State, stay: bool = False) -> list[State]:
    """From [client, ...] one state a client, on the host, or where they are: each type side by side, as it is sent."""
    if not stacked:
        return []
    count = len(next(iter(stacked.values())))
    one = {name: tensor[0] for name, tensor in stacked.items()}
    clients: list[State] = [{} for _ in range(count)]
    for names in by_type(stacked):
        rows = torch.cat([stacked[name].reshape(count, -1) for name in names], dim=1)
        rows = rows if stay else _to_host(rows)
        for client, row in zip(clients, rows, strict=True):
            client |= cut(row, one, names)
    return [{name: client[name] for name in stacked} for client in clients]


def _to_host(whole: Tensor) -> Tensor:
    if whole.device.type == "cpu":
        return whole
    return torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole)
