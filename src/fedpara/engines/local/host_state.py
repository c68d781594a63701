"""What a step changes on the host. A replay runs no Python, so such a step cannot be replayed."""

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedpara.engines.local.dropout import SeededDropout

DEPTH, LENGTH = 3, 10_000
"""Attributes are compared to this depth; longer lists only by their length."""
PLAIN = (bool, int, float, complex, str, bytes, type(None))
HostState = dict[str, Any]


def generators(on_gpu: bool) -> HostState:
    """The states of the global generators that a replay does not advance.

    torch's generator on the CPU is one of them if the model is on a GPU.
    """
    state: HostState = {
        "Python's generator": random.getstate(),
        "NumPy's generator": repr(np.random.get_state()),
    }
    if on_gpu:
        state["torch's generator on the CPU"] = torch.get_rng_state().tolist()
    return state


def attributes(things: Iterable[tuple[str, object]]) -> HostState:
    """The attributes of modules and other objects, and the variables around a function.

    Tensors count by identity, and the result keeps them alive.
    """
    state: HostState = {}
    for name, thing in things:
        for attribute, value in _own(thing):
            if not (attribute == "calls" and isinstance(thing, SeededDropout)):  # set before each step
                state |= dict(_parts(f"{name}.{attribute}".lstrip("."), value, DEPTH))
    return state


def with_parts(name: str, thing: object) -> list[tuple[str, object]]:
    """The object, and if it is a module, all modules in it, by name."""
    if isinstance(thing, nn.Module):
        return [(f"{name}.{part}".strip("."), module) for part, module in thing.named_modules()]
    return [(name, thing)]


def _own(thing: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for name in ("__self__", "func"):  # of a method, of a partial
        if hasattr(thing, name):
            yield name, getattr(thing, name)
    code: Any = getattr(thing, "__code__", None)
    for name, cell in zip(
        code.co_freevars if code else (), getattr(thing, "__closure__", None) or (), strict=True
    ):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


def changed(before: HostState, after: HostState) -> str:
    """The name of what differs between the two, or ""."""
    for name in {**before, **after}:
        if name not in before or name not in after or before[name] != after[name]:
            return _readable(name)
    return ""


def _readable(path: str) -> str:
    hidden = ("_buffers", "_parameters", "_modules", "__self__", "func")
    return ".".join(part for part in path.split(".") if part not in hidden)


class _Same:
    """Equal only to the same object, which it keeps alive so that no other object gets its address."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _parts(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, PLAIN):
        yield path, repr(value)  # NaN differs from itself
    elif isinstance(value, torch.Generator):
        yield path, value.get_state().tolist()
    elif isinstance(value, np.random.Generator):
        yield path, repr(value.bit_generator.state)
    elif isinstance(value, random.Random):
        yield path, value.getstate()
    elif isinstance(value, np.ndarray) and value.size <= LENGTH and not value.dtype.hasobject:
        yield path, value.tobytes()
    elif isinstance(value, Tensor | nn.Module | type) or not depth:
        yield path, _Same(value)
    elif isinstance(value, dict | list | tuple | set | frozenset | deque):
        yield path, len(value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        if len(value) <= LENGTH:
            for name, part in items:
                yield from _parts(f"{path}.{name}", part, depth - 1)
    else:
        yield path, _Same(value)
        for name, part in getattr(value, "__dict__", {}).items():
            yield from _parts(f"{path}.{name}", part, depth - 1)
