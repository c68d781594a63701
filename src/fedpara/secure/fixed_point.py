"""Updates in fixed point, and their sums modulo 2^(8 width).

    q = floor(a d / step + u),  u ~ U[0, 1):   E[step q] = a d,   |step q - a d| <= step,   |q| <= 2^(bits - 1)

d is the clipped update and a <= 1 the client's weight. A sum over n clients is at most n 2^(bits - 1) in size, so it
can be read from its remainder. With noise g the client rounds a d + g in place of a d, and the sum has room for it.
"""

import numpy as np
from numpy.typing import NDArray

from fedpara.secure.settings import SecAgg

Floats = NDArray[np.float64]
Ring = NDArray[np.unsignedinteger]
"""Numbers modulo 2^32, or modulo 2^64 if a number needs more than four bytes. NumPy's integers wrap around."""


def ring_type(width: int) -> type[np.unsignedinteger]:
    return np.uint32 if width <= 4 else np.uint64


def clipped(d: Floats, clip: float) -> Floats:
    """d min(1, clip / ||d||)"""
    norm = float(np.linalg.norm(d))
    return d if norm <= clip else d * (clip / norm)


def quantized(
    d: Floats, weight: float, how: SecAgg, width: int, rng: np.random.Generator, g: Floats | None = None
) -> Ring:
    """a d + g in fixed point, with stochastic rounding, so that the mean over clients is unbiased."""
    most, u = 2 ** (how.bits - 1), rng.random(d.shape)
    if g is None:
        q = np.clip(np.floor(d * (weight / how.step) + u), -most, most - 1)
    else:  # noise that is cut off would not be Gaussian
        q = np.floor(np.clip(d * (weight / how.step), -most, most - 1) + g / how.step + u)
    return q.astype(np.int64).astype(ring_type(width))


def restored(total: Ring, how: SecAgg, width: int) -> tuple[Floats, int]:
    """(the sum of the clients' a d, its largest magnitude in steps)"""
    top = 1 << (8 * width - 1)
    whole = total.astype(np.uint64) & np.uint64((1 << 8 * width) - 1)
    if width == 8:
        signed = whole.view(np.int64)
    else:
        signed = whole.astype(np.int64)
        signed = np.where(signed >= top, signed - 2 * top, signed)
    return signed * np.float64(how.step), int(np.abs(signed).max(initial=0))


def packed(numbers: Ring, width: int) -> NDArray[np.uint8]:
    """The lowest `width` bytes of each number, little-endian: [length, width]."""
    size = numbers.itemsize
    by_byte = numbers.astype(f"<u{size}", copy=False).view(np.uint8).reshape(-1, size)
    return np.ascontiguousarray(by_byte[:, :width])


def unpacked(data: NDArray[np.uint8], width: int) -> Ring:
    """The inverse of `packed`, for an array or a flat buffer of bytes."""
    rows = data.reshape(-1, width)
    wide = np.zeros((len(rows), np.dtype(ring_type(width)).itemsize), np.uint8)
    wide[:, :width] = rows
    return wide.view(f"<u{wide.shape[1]}").reshape(-1)
