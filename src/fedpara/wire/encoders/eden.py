"""eden: a random rotation, then b bits per number (DRIVE for b = 1, EDEN for more).

    z = H D x sqrt(d) / ||x||,   value = S D H Q(z)   per block of d numbers

D are random signs and H is the orthonormal Hadamard transform. After the rotation the numbers of z are close to
N(0, 1), whatever x was, and Q(z) are the levels that minimise E (z - Q(z))^2 for N(0, 1). The scale S is one of

    unbiased    S = ||x||^2 / <H D x, Q(z)>     E[value] = x for a uniform rotation; a Hadamard rotation comes close
    otherwise   S = <H D x, Q(z)> / ||Q(z)||^2  the smallest squared error, for error feedback

The signs D follow from a seed of 32 bits per tensor, which the message holds. The transform adds and subtracts only, so
both ends get the same bits on any device.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.wire.encoders.bits import pack, packed_length, unpack
from fedpara.wire.encoders.core import Layout, Parts

# The positive levels of Lloyd and Max for N(0, 1), by bits.
_POSITIVE = {
    1: (0.7978845608,),
    2: (0.4527800398, 1.510417607),
    4: (
        *(0.1283950298, 0.3880482995, 0.6567589958, 0.9423403065),
        *(1.256231155, 1.618046364, 2.069016880, 2.732589571),
    ),
}


@dataclass(frozen=True)
class Eden:
    bits: int
    block: int
    unbiased: bool

    @property
    def text(self) -> str:
        return f"eden(bits={self.bits}, block={self.block}, unbiased={self.unbiased})"

    def layout(self, shape: torch.Size) -> Layout:
        widths = self._widths(shape.numel())
        count = sum(number * width for number, width in widths)
        return {
            "codes": (torch.uint8, packed_length(count, 1 << self.bits)),
            "scales": (torch.float32, sum(number for number, _ in widths)),
            "seed": (torch.int32, 1),
        }

    def encode(self, x: Tensor, generator: torch.Generator) -> Parts:
        seed = torch.randint(
            -(1 << 31), 1 << 31, (1,), generator=generator, dtype=torch.int32, device=generator.device
        )
        codes, scales = [], []
        for values, signs in self._blocks(x.reshape(-1), int(seed)):
            largest = values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            turned = hadamard(
                values / largest * signs
            )  # divided, so that squares neither overflow nor vanish
            squared = turned.square().sum(1, keepdim=True)
            z = turned * torch.rsqrt(squared.clamp_min(1e-30) / turned.shape[1])
            found = torch.bucketize(z, _boundaries(self.bits).to(z.device))
            levels = _levels(self.bits).to(z.device)[found]
            dot = (turned * levels).sum(1, keepdim=True).clamp_min(1e-30)
            scale = squared / dot if self.unbiased else dot / levels.square().sum(1, keepdim=True)
            codes.append(found.to(torch.uint8).view(-1))
            scales.append((scale * largest).view(-1).clamp_max(torch.finfo(torch.float32).max))
        return {
            "codes": pack(torch.cat(codes), 1 << self.bits),
            "scales": torch.cat(scales),
            "seed": seed.to(x.device),
        }

    def decode(self, parts: Parts, shape: torch.Size) -> Tensor:
        scales = parts["scales"]
        if not bool(((scales >= 0) & scales.isfinite()).all()):
            raise WireError("a scale is negative, infinite or not a number: expected finite numbers.")
        count, widths = shape.numel(), self._widths(shape.numel())
        total = sum(number * width for number, width in widths)
        codes = unpack(parts["codes"], 1 << self.bits, total)
        levels = _levels(self.bits).to(codes.device)[codes.int()]
        split = levels.split([number * width for number, width in widths])
        turned = [part.view(number, width) for part, (number, width) in zip(split, widths, strict=True)]
        by_block = scales.split([number for number, _ in widths])
        signs = _signs(int(parts["seed"]), total, codes.device).split([part.numel() for part in turned])
        values = [
            (hadamard(part) * sign.view(part.shape)).mul_(scale[:, None]).view(-1)
            for part, sign, scale in zip(turned, signs, by_block, strict=True)
        ]
        return torch.cat(values)[:count].view(shape)

    def _widths(self, count: int) -> list[tuple[int, int]]:
        """(number of blocks, width): the full blocks, and a last one of the next power of two."""
        full, rest = divmod(count, self.block)
        return [(full, self.block)] * bool(full) + [(1, 1 << (rest - 1).bit_length())] * bool(rest)

    def _blocks(self, flat: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
        """(values [block, width], signs) of the full blocks and of the last one, filled with zeros."""
        widths = self._widths(flat.numel())
        total = sum(number * width for number, width in widths)
        filled = torch.nn.functional.pad(flat, (0, total - flat.numel()))
        sizes, signs = [number * width for number, width in widths], _signs(seed, total, flat.device)
        return [
            (values.view(number, width), sign.view(number, width))
            for values, sign, (number, width) in zip(
                filled.split(sizes), signs.split(sizes), widths, strict=True
            )
        ]


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


def _signs(seed: int, count: int, device: torch.device) -> Tensor:
    """-1 or 1 from a seed, drawn on the host as bytes."""
    generator = torch.Generator().manual_seed(seed & 0xFFFFFFFF)
    bytes_ = torch.randint(0, 256, (packed_length(count, 2),), generator=generator, dtype=torch.uint8)
    digits = unpack(bytes_.to(device), 2, 8 * len(bytes_))[:count]
    return digits.float().mul_(2).sub_(1)


@cache
def _levels(bits: int) -> Tensor:
    positive = torch.tensor(_POSITIVE[bits])
    return torch.cat([-positive.flip(0), positive])


@cache
def _boundaries(bits: int) -> Tensor:
    levels = _levels(bits)
    return (levels[1:] + levels[:-1]) / 2
