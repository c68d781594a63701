"""Freight: states between host and device in one copy a type, where a copy a tensor would wait on each."""

from collections import defaultdict

import torch
from torch import Tensor

from fedpara.state import State


def bring(state: State, device: torch.device) -> State:
    """The state on the device. On the host it is the state itself."""
    if device.type == "cpu" or not state:
        return dict(state)
    there: State = {}
    for names in _by_type(state).values():
        flat = torch.cat([state[name].reshape(-1) for name in names]).to(device)
        parts = flat.split([state[name].numel() for name in names])
        there |= {name: part.view(state[name].shape) for name, part in zip(names, parts, strict=True)}
    return {name: there[name] for name in state}


def fetch(stacked: State) -> list[State]:
    """From [client, ...] on the device, one state a client on the host."""
    if not stacked:
        return []
    count = len(next(iter(stacked.values())))
    clients: list[State] = [{} for _ in range(count)]
    for names in _by_type(stacked).values():
        flat = torch.cat([stacked[name].reshape(count, -1) for name in names], dim=1)
        rows = _to_host(flat)
        sizes = [stacked[name][0].numel() for name in names]
        shapes = [stacked[name].shape[1:] for name in names]
        for client, row in zip(clients, rows, strict=True):
            for name, part, shape in zip(names, row.split(sizes), shapes, strict=True):
                client[name] = part.view(shape)
    return [{name: client[name] for name in stacked} for client in clients]


def _to_host(flat: Tensor) -> Tensor:
    if flat.device.type == "cpu":
        return flat
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)


def _by_type(state: State) -> dict[torch.dtype, list[str]]:
    """Sorted, as messages are: what is fetched then lies in memory as it will be sent."""
    names: dict[torch.dtype, list[str]] = defaultdict(list)
    for name in sorted(state):
        names[state[name].dtype].append(name)
    return names
