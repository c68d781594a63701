"""int4, int2 and ternary: stochastic rounding to L equally spaced levels, with one scale per block.

    value = s (2 c / (L - 1) - 1),   c = floor((x / s + 1) (L - 1) / 2 + u),   u ~ U[0, 1)

s is the largest |x| of a block, rounded up to a bfloat16, so nothing is clipped: E[value] = x. The error is below one
step, 2 s / (L - 1).

    int4      15 levels, -7 to 7 sevenths of s; two per byte
    int2      4 levels, -s, -s/3, s/3 and s; four per byte
    ternary   3 levels, -s, 0 and s; five per byte
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.wire.encoders.bits import pack, packed_length, unpack
from fedpara.wire.encoders.core import Layout, Parts, from_rows, in_rows, reshaped
from fedpara.wire.encoders.draws import uniform


@dataclass(frozen=True)
class Levels:
    name: str
    levels: int
    base: int
    block: int

    @property
    def text(self) -> str:
        return f"{self.name}(block={self.block})"

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        counts = [shape.numel() for shape in shapes]
        return {
            "codes": (torch.uint8, packed_length(sum(counts), self.base)),
            "scales": (torch.bfloat16, sum(-(-count // self.block) for count in counts)),
        }

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        return sum(shape.numel() for shape in shapes)

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        half = (self.levels - 1) / 2
        blocks = in_rows(tensors, self.block)
        scales = rounded_up(blocks.abs().amax(1))
        # A block of zeros has s = 0: any divisor gives its middle.
        steps = scales.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        blocks = blocks.div_(steps).mul_(half).add_(half)  # `in_rows` copied them
        levels = torch.cat(from_rows(blocks, [tensor.numel() for tensor in tensors]))
        levels.add_(uniform(levels.numel(), generator, levels.device)).floor_()
        # In float32 a sum just below L may round up to L.
        codes = levels.clamp_(0, self.levels - 1).to(torch.uint8)
        return {"codes": pack(codes, self.base), "scales": scales}

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        counts, half = [shape.numel() for shape in shapes], (self.levels - 1) / 2
        scales = sound_scales(parts["scales"])
        codes = unpack(parts["codes"], self.base, sum(counts))
        if self.levels < self.base and bool((codes >= self.levels).any()):
            raise WireError(f"a code is above {self.levels - 1}: expected {self.levels} levels.")
        values = in_rows(codes.float().sub_(half).split(counts), self.block)
        return reshaped(from_rows(values.mul_(scales[:, None] / half), counts), shapes)


def rounded_up(x: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below the nonnegative float32 x."""
    return (x.float().view(torch.int32) + 0xFFFF).bitwise_and_(~0xFFFF).view(torch.float32).to(torch.bfloat16)


def sound_scales(scales: Tensor) -> Tensor:
    """The scales in float32. WireError unless all are finite and 0 or more."""
    wide = scales.float()
    if not bool(((wide >= 0) & wide.isfinite()).all()):
        raise WireError("a scale is negative, infinite or not a number: expected finite numbers, 0 or more.")
    return wide
