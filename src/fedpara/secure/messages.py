"""The messages of the four stages, in the format of every other message (`wire.codec`): nothing is unpickled.

    stage     server to client                                  client to server
    keys      -                                                 public keys, a commitment to b
    shares    its neighbours' keys, the size of the cohort      sealed shares, one per neighbour
    masked    sealed shares from its neighbours, its weight     the masked vector
    unmask    who is alive, who vanished                        its shares of their secrets

A message names its stage, its round and its sender. `read` refuses a message whose stage, round, sender,
names, types or shapes differ from the expected ones.
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedpara.errors import WireError
from fedpara.wire import Header, decode, encode
from fedpara.wire.tensors import shown

Stage = Literal["keys", "shares", "masked", "unmask"]
STAGES: tuple[Stage, ...] = ("keys", "shares", "masked", "unmask")

Array = NDArray[np.generic]
Spec = Mapping[str, tuple[type[np.generic], tuple[int | None, ...]]]
"""The type and shape of each array. Sizes that are None are free; the first free size is the same in all arrays."""


def write(stage: Stage, round: int, sender: str, arrays: Mapping[str, Array]) -> bytes:
    state = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}  # a writable copy
    return encode(state, Header(round, f"secagg-{stage}", "", sender, 0))


def read(message: bytes, stage: Stage, round: int, sender: str, spec: Spec) -> dict[str, Array]:
    """The arrays of a message. WireError if it is not the expected one."""
    header, state = decode(message, link="float32")
    got = header.round, header.method, header.sender
    if got != (round, f"secagg-{stage}", sender):
        raise WireError(
            f"a message of {shown(header.sender)}, round {header.round}, {shown(header.method)}: expected {sender}, "
            f"round {round}, 'secagg-{stage}'."
        )
    if state.keys() != spec.keys():
        raise WireError(f"a message with {shown(sorted(state))}: expected {', '.join(sorted(spec))}.")
    arrays = {name: state[name].numpy() for name in spec}
    free = next((a.shape[0] for name, a in arrays.items() if a.ndim and spec[name][1][:1] == (None,)), 0)
    for name, (kind, shape) in spec.items():
        expected = tuple(free if size is None else size for size in shape)
        if arrays[name].dtype != kind or arrays[name].shape != expected:
            raise WireError(
                f"{name!r} is {arrays[name].dtype}{list(arrays[name].shape)}: expected "
                f"{np.dtype(kind)}{list(expected)}."
            )
        if arrays[name].dtype == np.float64 and not all(map(math.isfinite, arrays[name].flat)):
            raise WireError(f"{name!r} holds NaN or infinity: expected finite numbers.")
    return arrays


def rows(parts: list[bytes], size: int) -> NDArray[np.uint8]:
    """Byte strings of one size as an array [count, size]."""
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), size)


def numbers(clients: list[int]) -> NDArray[np.int64]:
    return np.array(clients, np.int64)


def distinct(clients: Array, what: str) -> list[int]:
    """The client numbers of a message. WireError if one appears twice."""
    listed: list[int] = clients.tolist()
    if len({*listed}) != len(listed):
        raise WireError(f"{what} names a client twice.")
    return listed
