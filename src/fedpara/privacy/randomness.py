"""Gaussian noise from a cryptographic stream.

    bytes   SHAKE-256(key | block)
    u, v    53 bits each, in (0, 1] and [0, 1)
    noise   sqrt(-2 ln u) cos(2 pi v), sqrt(-2 ln u) sin(2 pi v)      Box and Muller, in float64

torch's and NumPy's generators are not secure: whoever sees enough of their output can compute the rest, and subtract
the noise. A fresh key of 256 bits from the operating system costs nothing.
"""

import secrets
from hashlib import shake_256

import numpy as np
import torch
from numpy.typing import NDArray

from fedpara.state import State

BLOCK = 1 << 20
"""Numbers per block, so that the stream of a large tensor does not have to fit into memory."""
_UNIT = 2.0**-53


def fresh_key() -> bytes:
    """256 bits from the operating system's generator."""
    return secrets.token_bytes(32)


def seeded_key(seed: int, *where: int) -> bytes:
    """A key that anyone with the seed can compute: the noise is reproducible, but hides nothing."""
    return f"seed {seed} {' '.join(map(str, where))}".encode()


class Noise:
    """Standard Gaussian numbers from a key, in order. The same key and calls give the same numbers."""

    def __init__(self, key: bytes) -> None:
        self._key, self._position = key, 0

    def like(self, state: State) -> State:
        """One number per entry of the state, in float64 on its device, in the order of its names."""
        return {
            name: torch.from_numpy(self.draw(tensor.numel())).reshape(tensor.shape).to(tensor.device)
            for name, tensor in state.items()
        }

    def draw(self, count: int) -> NDArray[np.float64]:
        parts = [self._block(min(BLOCK, count - start)) for start in range(0, count, BLOCK)]
        return np.concatenate(parts) if parts else np.empty(0)

    def _block(self, count: int) -> NDArray[np.float64]:
        pairs = -(-count // 2)
        stream = shake_256(self._key + b"|" + self._position.to_bytes(8, "little")).digest(pairs * 16)
        self._position += 1
        bits = np.frombuffer(stream, np.dtype("<u8")) >> np.uint64(11)
        u, v = (bits[:pairs] + 1.0) * _UNIT, bits[pairs:] * _UNIT
        radius = np.sqrt(-2.0 * np.log(u))
        return np.concatenate([radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)])[:count]
