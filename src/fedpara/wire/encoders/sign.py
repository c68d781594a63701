"""sign: the sign of each number, and the mean |x| of each block (scaled signSGD). Biased: use error feedback.

value = s sign(x),   s = mean |x| over the block: of all scales this one has the smallest squared error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpara.wire.encoders.bits import pack, packed_length, unpack
from fedpara.wire.encoders.core import Layout, Parts, rows
from fedpara.wire.encoders.levels import sound_scales


@dataclass(frozen=True)
class Sign:
    block: int

    @property
    def text(self) -> str:
        return f"sign(block={self.block})"

    def layout(self, shape: torch.Size) -> Layout:
        count = shape.numel()
        return {
            "signs": (torch.uint8, packed_length(count, 2)),
            "scales": (torch.bfloat16, -(-count // self.block)),
        }

    def encode(self, x: Tensor, generator: torch.Generator) -> Parts:
        blocks = rows(x, self.block)
        counts = torch.full((len(blocks),), float(self.block), device=x.device)
        counts[-1] -= blocks.numel() - x.numel()
        # Divided first: the sum of large numbers could overflow.
        scales = (blocks.abs() / counts[:, None]).sum(1)
        signs = (x.reshape(-1) >= 0).to(torch.uint8)
        return {"signs": pack(signs, 2), "scales": scales.to(torch.bfloat16)}

    def decode(self, parts: Parts, shape: torch.Size) -> Tensor:
        scales = sound_scales(parts["scales"])
        signs = unpack(parts["signs"], 2, shape.numel()).float().mul_(2).sub_(1)
        return rows(signs, self.block).mul_(scales[:, None]).view(-1)[: shape.numel()].view(shape)
