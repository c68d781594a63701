"""eden: a random rotation, then b bits per number (DRIVE for b = 1, EDEN for more).

    z = H D x sqrt(d) / ||x||,   value = S D H Q(z)   per block of d numbers

D are random signs and H is the orthonormal Hadamard transform. After the rotation the numbers of z are close to
N(0, 1), whatever x was, and Q(z) are the levels that minimise E (z - Q(z))^2 for N(0, 1). The scale S is one of

    unbiased    S = ||x||^2 / <H D x, Q(z)>     E[value] = x for a uniform rotation; a Hadamard rotation comes close
    otherwise   S = <H D x, Q(z)> / ||Q(z)||^2  the smallest squared error, for error feedback

The signs D follow from a seed of 32 bits, which the message holds. The transform adds and subtracts only, so
both ends get the same bits on any device.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.wire.encoders.bits import pack, packed_length, unpack
from fedpara.wire.encoders.core import Layout, Parts, from_rows, in_rows, reshaped

# The positive levels of Lloyd and Max for N(0, 1), by bits.
_POSITIVE = {
    1: (0.7978845608,),
    2: (0.4527800398, 1.510417607),
    4: (
        *(0.1283950298, 0.3880482995, 0.6567589958, 0.9423403065),
        *(1.256231155, 1.618046364, 2.069016880, 2.732589571),
    ),
}


Piece = tuple[int, int, int]
"""The number of the tensor, the start of the piece in it, and the length of the piece."""


@dataclass(frozen=True)
class Eden:
    bits: int
    block: int
    unbiased: bool

    @property
    def text(self) -> str:
        return f"eden(bits={self.bits}, block={self.block}, unbiased={self.unbiased})"

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        groups = _groups(self.block, tuple(shapes))
        count = sum(width * len(pieces) for width, pieces in groups.items())
        return {
            "codes": (torch.uint8, packed_length(count, 1 << self.bits)),
            "scales": (torch.float32, sum(map(len, groups.values()))),
            "seed": (torch.int32, 1),
        }

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        return 0

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        seed = torch.randint(
            -(1 << 31), 1 << 31, (1,), generator=generator, dtype=torch.int32, device=generator.device
        )
        codes, scales = [], []
        flat = [tensor.reshape(-1) for tensor in tensors]
        groups = _groups(self.block, tuple(tensor.shape for tensor in tensors))
        for (width, pieces), signs in zip(
            groups.items(), self._signs(int(seed), groups, flat[0].device), strict=True
        ):
            values = in_rows((flat[i][start : start + size] for i, start, size in _merged(pieces)), width)
            largest = values.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
            # Divided first: otherwise squares could overflow or vanish.
            turned = hadamard(values.div_(largest).mul_(signs))
            squared = turned.square().sum(1, keepdim=True)
            z = turned * torch.rsqrt(squared.clamp_min(1e-30) / width)
            found = torch.bucketize(z, _boundaries(self.bits, z.device), out_int32=True)
            levels = _levels(self.bits, z.device)[found]
            dot = turned.mul_(levels).sum(1, keepdim=True).clamp_min_(1e-30)
            scale = squared / dot if self.unbiased else dot / levels.square_().sum(1, keepdim=True)
            codes.append(found.to(torch.uint8).view(-1))
            scales.append((scale * largest).view(-1).clamp_max_(torch.finfo(torch.float32).max))
        packed = pack(torch.cat(codes), 1 << self.bits)
        return {"codes": packed, "scales": torch.cat(scales), "seed": seed.to(packed.device)}

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        if not bool(((parts["scales"] >= 0) & parts["scales"].isfinite()).all()):
            raise WireError("a scale is negative, infinite or not a number: expected finite numbers.")
        groups = _groups(self.block, tuple(shapes))
        sizes = [width * len(pieces) for width, pieces in groups.items()]
        codes = unpack(parts["codes"], 1 << self.bits, sum(sizes)).split(sizes)
        scales = parts["scales"].split([len(pieces) for pieces in groups.values()])
        levels = _levels(self.bits, parts["codes"].device)
        made = [torch.empty(shape.numel(), device=levels.device) for shape in shapes]
        signs = self._signs(int(parts["seed"]), groups, levels.device)
        for (width, pieces), code, scale, sign in zip(groups.items(), codes, scales, signs, strict=True):
            values = hadamard(levels[code.int()].view(-1, width)).mul_(sign).mul_(scale[:, None])
            merged = _merged(pieces)
            flat = from_rows(values, [size for _, _, size in merged])
            for (i, start, size), one in zip(merged, flat, strict=True):
                made[i][start : start + size] = one
        return reshaped(made, shapes)

    def _signs(self, seed: int, groups: Mapping[int, list[Piece]], device: torch.device) -> list[Tensor]:
        """The signs of each group, [block, width]."""
        sizes = [width * len(pieces) for width, pieces in groups.items()]
        drawn = random_signs(seed, sum(sizes), device).split(sizes)
        return [signs.view(-1, width) for signs, width in zip(drawn, groups, strict=True)]


@lru_cache(maxsize=16)
def _groups(block: int, shapes: tuple[torch.Size, ...]) -> dict[int, list[Piece]]:
    """Pieces of the tensors by width: the full blocks, and the last of each tensor in the next power of two."""
    groups: dict[int, list[Piece]] = {}
    for i, shape in enumerate(shapes):
        count = shape.numel()
        for start in range(0, count, block):
            size = min(block, count - start)
            groups.setdefault(1 << (size - 1).bit_length(), []).append((i, start, size))
    return groups


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces, with neighbours in one tensor joined: all full blocks of a tensor are one piece."""
    found: list[Piece] = []
    for i, start, size in pieces:
        if found and found[-1][0] == i:
            found[-1] = i, found[-1][1], start + size - found[-1][1]
        else:
            found.append((i, start, size))
    return found


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of each row; its own inverse. The width is a power of two.

    H_(ab) = H_a kron H_b: once along each side of [a, b], so that every addition runs over neighbours in memory.
    """
    number, width = x.shape
    side = 1 << (width.bit_length() // 2)
    half = _along_rows(x.view(number, -1, side))
    whole = _along_rows(half.transpose(1, 2).contiguous())
    return whole.transpose(1, 2).reshape(number, width).div_(math.sqrt(width))


def _along_rows(x: Tensor) -> Tensor:
    """The transform along the middle of [number, count, inner], without its factor."""
    number, count, inner = x.shape
    step = 1
    while step < count:
        pairs = x.view(number, -1, 2, step * inner)
        made = torch.empty_like(pairs)
        torch.add(pairs[:, :, 0], pairs[:, :, 1], out=made[:, :, 0])
        torch.sub(pairs[:, :, 0], pairs[:, :, 1], out=made[:, :, 1])
        x, step = made, 2 * step
    return x.view(number, count, inner)


@lru_cache(maxsize=1)
def random_signs(seed: int, count: int, device: torch.device) -> Tensor:
    """-1 or 1 from a seed, drawn on the host as bytes. In a simulation the server decodes what was just encoded."""
    generator = torch.Generator().manual_seed(seed & 0xFFFFFFFF)
    bytes_ = torch.randint(0, 256, (packed_length(count, 2),), generator=generator, dtype=torch.uint8)
    digits = unpack(bytes_.to(device), 2, 8 * len(bytes_))[:count]
    return digits.float().mul_(2).sub_(1)


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    positive = torch.tensor(_POSITIVE[bits])
    return torch.cat([-positive.flip(0), positive]).to(device)


@cache
def _boundaries(bits: int, device: torch.device) -> Tensor:
    levels = _levels(bits, device)
    return (levels[1:] + levels[:-1]) / 2
