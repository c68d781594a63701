"""sign: the sign of each number, and the mean |x| of each block (scaled signSGD). Biased: use error feedback.

value = s sign(x),   s = mean |x| over the block: of all scales this one has the smallest squared error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedpara.wire.encoders.bits import pack, packed_length, unpack
from fedpara.wire.encoders.core import Layout, Parts, from_rows, in_rows, reshaped
from fedpara.wire.encoders.levels import sound_scales


@dataclass(frozen=True)
class Sign:
    block: int

    @property
    def text(self) -> str:
        return f"sign(block={self.block})"

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        counts = [shape.numel() for shape in shapes]
        return {
            "signs": (torch.uint8, packed_length(sum(counts), 2)),
            "scales": (torch.bfloat16, sum(-(-count // self.block) for count in counts)),
        }

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        return 0

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        counts = [tensor.numel() for tensor in tensors]
        blocks = in_rows(tensors, self.block)
        signs = torch.cat(from_rows((blocks >= 0).to(torch.uint8), counts))
        # Divided first: the sum of large numbers could overflow.
        scales = blocks.abs_().div_(_sizes(self.block, tuple(counts), blocks.device)[:, None]).sum(1)
        return {"signs": pack(signs, 2), "scales": scales.to(torch.bfloat16)}

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        counts = [shape.numel() for shape in shapes]
        scales = sound_scales(parts["scales"])
        signs = unpack(parts["signs"], 2, sum(counts)).float().mul_(2).sub_(1)
        values = in_rows(signs.split(counts), self.block).mul_(scales[:, None])
        return reshaped(from_rows(values, counts), shapes)


@lru_cache(maxsize=16)
def _sizes(block: int, counts: tuple[int, ...], device: torch.device) -> Tensor:
    """How many numbers each block holds: the last one of a tensor may not be full."""
    sizes = [min(block, count - start) for count in counts for start in range(0, count, block)]
    return torch.tensor(sizes, device=device)
