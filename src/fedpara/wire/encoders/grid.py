"""grid: multiples of a power of two per tensor, written with few bits where most of them are small.

    value = n U,   U = 2^round(log2(step rms(x))),   n = floor(x / U + v),   v uniform in [0, 1)

E[value] = x, and the error is below U. With step 0 nothing is rounded, as long as |n| < 2^23: U is then the largest
power of two that divides all numbers of the tensor.

The digit of n is z = 0, 1, 2, 3, ... for n = 0, -1, 1, -2, ... A byte holds 2 digits of base 16, 3 of base 6 or 4 of
base 4, whichever is estimated to give the shortest message. The largest digit stands for all larger z, which are listed
beside it. Deflate gives frequent bytes a short Huffman code. So the length of a message depends on its numbers, and
slightly on the version of zlib.

On a downlink, `halve=h` makes the step finer as training slows down: the server's grid in round t has the step
step * 2^(-t/h). With a constant step, the error in the clients' model stays as large when the learning rate is small.

Sums and differences of multiples of powers of two are exact in float32. So a server whose models lie on such grids can
send any client one message with the change of the model since the client's last one (`engines/differences.py`).
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.wire.encoders.bits import DIGITS, pack, packed_length, unpack
from fedpara.wire.encoders.core import AtMost, Layout, Parts, reshaped
from fedpara.wire.encoders.draws import uniform

EXACT = "grid(0.0)"
"""The link for numbers that already lie on grids."""
SMALLEST, LARGEST_UNIT = -100, 100
"""The exponents of U."""
RANGE = 1 << 23
"""|n| is below this: n is exact in float32, and z has three bytes."""
BASES = (4, 6, 16)
LISTED_BITS = 10
"""The approximate size of a listed number, in bits."""


@dataclass(frozen=True)
class Grid:
    step: float
    halve: float | None = None  # the rounds in which the step of a downlink falls to a half

    @property
    def text(self) -> str:
        return f"grid({self.step!r})" if self.halve is None else f"grid({self.step!r}, halve={self.halve!r})"

    def at(self, round: int) -> "Grid":
        """The grid of the server's model in this round."""
        return self if self.halve is None else Grid(self.step * 2.0 ** (-round / self.halve))

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        count = sum(shape.numel() for shape in shapes)
        return {
            "exponents": (torch.int8, len(shapes)),
            "base": (torch.uint8, 1),
            "digits": (torch.uint8, AtMost(_longest(packed_length(count, max(BASES))))),
            "listed": (torch.uint8, AtMost(_longest(3 * count))),
        }

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        return sum(shape.numel() for shape in shapes) if self.step else 0

    def rounded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The nearest multiples of U."""
        if not self.step:
            return list(tensors)
        units = _power(self._exponents(tensors)).unbind()
        return [(t / unit).round() * unit for t, unit in zip(tensors, units, strict=True)]

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        counts = [tensor.numel() for tensor in tensors]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self.step:
            units = _per_number(_power(self._exponents(tensors)), counts)
            flat = (flat / units).add_(uniform(len(flat), generator, flat.device)).floor_().mul_(units)
        exponents = _common_exponents(flat, counts)
        n = (flat * _per_number(_power(-exponents), counts)).round_().to(torch.int32)
        z = (n << 1) ^ (n >> 31)
        base = _best_base(z)
        digits = z.clamp_max(base - 1).to(torch.uint8)
        return {
            "exponents": exponents.to(torch.int8),
            "base": torch.tensor([base], dtype=torch.uint8, device=flat.device),
            "digits": _shortened(pack(digits, base), zlib.Z_HUFFMAN_ONLY),
            "listed": _shortened(_planes(z[digits == base - 1]), zlib.Z_DEFAULT_STRATEGY),
        }

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        counts, exponents = [shape.numel() for shape in shapes], parts["exponents"]
        if bool(((exponents < SMALLEST) | (exponents > LARGEST_UNIT)).any()):
            raise WireError(f"an exponent is outside {SMALLEST} to {LARGEST_UNIT}.")
        base, count = int(parts["base"]), sum(counts)
        if base not in BASES:
            raise WireError(f"the base is {base}: expected one of {BASES}.")
        digits = unpack(_restored(parts["digits"], packed_length(count, base)), base, count)
        listed = digits == base - 1
        z = digits.to(torch.int32)
        z[listed] = _from_planes(_restored(parts["listed"], 3 * int(listed.sum())))
        if bool((z[listed] < base - 1).any()):
            raise WireError(f"a listed number is below {base - 1}: expected a digit in its place.")
        n = (z >> 1) ^ -(z & 1)
        flat = n.float() * _per_number(_power(exponents.to(torch.int32)), counts)
        return reshaped(flat.split(counts), shapes)

    def _exponents(self, tensors: Sequence[Tensor]) -> Tensor:
        """round(log2(step rms)) of each tensor; the smallest exponent for a tensor of zeros."""
        squares = torch.stack([tensor.double().square().mean() for tensor in tensors])
        exponents = (squares.sqrt() * self.step).log2().round()
        return exponents.clamp(SMALLEST, LARGEST_UNIT).to(torch.int32)


def exactly(tensors: Sequence[Tensor]) -> bool:
    """Whether `Grid(0)` sends these tensors without loss."""
    counts = [tensor.numel() for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    n = flat * _per_number(_power(-_common_exponents(flat, counts)), counts)
    return bool((n == n.round()).all())


def _common_exponents(flat: Tensor, counts: Sequence[int]) -> Tensor:
    """e of each tensor: 2^e divides all its numbers, or is the smallest power of two with |x| / 2^e < RANGE."""
    bits = flat.view(torch.int32) & 0x7FFFFFFF
    fraction = bits & 0x7FFFFF | 0x800000
    last = (fraction & -fraction).float().view(torch.int32) >> 23  # 127 + the position of the last set bit
    finest = torch.where(bits == 0, LARGEST_UNIT, (bits >> 23) - 150 + last - 127)
    coarsest = (bits >> 23) - 126 - (RANGE.bit_length() - 1)
    pieces = zip(finest.split(list(counts)), coarsest.split(list(counts)), strict=True)
    exponents = torch.stack([torch.maximum(fine.min(), coarse.max()) for fine, coarse in pieces])
    return exponents.clamp(SMALLEST, LARGEST_UNIT)


def _per_number(values: Tensor, counts: Sequence[int]) -> Tensor:
    return values.repeat_interleave(torch.tensor(counts, device=values.device), output_size=sum(counts))


def _power(exponents: Tensor) -> Tensor:
    """2^e, exactly, of int32 exponents. `pow` need not be exact on every device."""
    return ((exponents + 127) << 23).view(torch.float32)


def _best_base(z: Tensor) -> int:
    """The base with the fewest bits per number: the digits' entropy, at least 1 bit per byte, and what is listed."""
    counts: list[int] = torch.bincount(z.clamp_max(max(BASES) - 1), minlength=max(BASES)).tolist()

    def bits(base: int) -> float:
        listed = sum(counts[base - 1 :])
        shares = [count / z.numel() for count in (*counts[: base - 1], listed) if count]
        entropy = -sum(share * math.log2(share) for share in shares)
        return max(entropy, 1 / DIGITS[base]) + LISTED_BITS * listed / z.numel()

    return min(BASES, key=bits)


def _planes(z: Tensor) -> Tensor:
    """Three planes: all low bytes, then all middle bytes, then all high bytes."""
    return torch.cat([(z >> shift & 0xFF).to(torch.uint8) for shift in (0, 8, 16)])


def _from_planes(planes: Tensor) -> Tensor:
    low, middle, high = planes.to(torch.int32).view(3, len(planes) // 3).unbind()
    return low | middle << 8 | high << 16


def _longest(length: int) -> int:
    """An upper bound on the deflated size of `length` bytes: at worst deflate stores them in blocks."""
    return length + length // 1000 + 16


def _shortened(data: Tensor, strategy: int) -> Tensor:
    compressor = zlib.compressobj(6, wbits=-15, strategy=strategy)
    made = bytearray(compressor.compress(data.cpu().numpy().tobytes()) + compressor.flush())
    return torch.frombuffer(made, dtype=torch.uint8).to(data.device)


def _restored(data: Tensor, length: int) -> Tensor:
    """`length` bytes. WireError if the data holds fewer or more, or does not end where the code ends."""
    decompressor = zlib.decompressobj(wbits=-15)
    try:
        made = bytearray(decompressor.decompress(data.cpu().numpy().tobytes(), length + 1))
    except zlib.error:
        raise WireError("the numbers of a grid are not in deflate's format.") from None
    if len(made) != length or not decompressor.eof or decompressor.unused_data:
        raise WireError(f"the numbers of a grid decode to {len(made)} bytes or more: expected {length}.")
    return torch.frombuffer(made, dtype=torch.uint8).to(data.device) if made else data.new_empty(0)
