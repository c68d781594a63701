"""Moves states between host and device with one copy per dtype: each copy waits for the device."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedpara.algorithms import Variables
from fedpara.layout import by_type, cut, flat
from fedpara.state import State

HOST = torch.device("cpu")


def move(state: Mapping[str, Tensor], device: torch.device) -> State:
    """The state on the device. Tensors that are already there are not copied.

    Copies from a GPU go to pinned memory, which makes both directions several times faster.
    """
    there = {name: tensor for name, tensor in state.items() if tensor.device.type == device.type}
    if len(there) == len(state):
        return there
    rest = {name: tensor for name, tensor in state.items() if name not in there}
    for names in by_type(rest):
        whole = flat(rest, names)
        there |= cut(_to_host(whole) if device == HOST else whole.to(device), rest, names)
    return {name: there[name] for name in state}


def move_variables(variables: Variables, device: torch.device) -> Variables:
    return {name: move(state, device) for name, state in variables.items()}


def stack_on(states: Sequence[State], device: torch.device) -> State:
    """States with the same names and shapes, stacked as [client, ...] on the device."""
    first, there = states[0], State()
    for names in by_type(first):
        there |= cut(torch.stack([flat(state, names) for state in states]).to(device), first, names)
    return {name: there[name] for name in first}


def fetch(stacked: State, stay: bool = False) -> list[State]:
    """One state per client from [client, ...], on the host unless `stay`.

    Tensors of one dtype share memory, in the order of a message.
    """
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
