"""stc: the signs of the numbers with the largest magnitude, their positions, and their mean magnitude per tensor.

Sparse ternary compression (Sattler et al., 2019). Biased: use error feedback.

    value = s sign(x) for the k largest |x| of a tensor, 0 for the others;   s = mean |x| of these k

At 1% a number costs 0.1 bits, where `topk` with its values in bfloat16 needs 0.25.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpara.wire.encoders.bits import pack, packed_length, unpack
from fedpara.wire.encoders.core import Layout, Parts
from fedpara.wire.encoders.levels import sound_scales
from fedpara.wire.encoders.positions import (
    count,
    decode_positions,
    encode_positions,
    kept,
    largest,
    position_layout,
    scattered,
)


@dataclass(frozen=True)
class SparseTernary:
    fraction: float

    @property
    def text(self) -> str:
        return f"stc({self.fraction!r})"

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        signs = sum(count(self.fraction, shape.numel()) for shape in shapes)
        return {
            "signs": (torch.uint8, packed_length(signs, 2)),
            "scales": (torch.bfloat16, len(shapes)),
            **position_layout(self.fraction, shapes),
        }

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        return 0

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        these = kept(self.fraction, tuple(tensor.shape for tensor in tensors), flat.device)
        chosen = largest(flat, these)
        values = flat[chosen]
        # Divided first: the sum of large numbers could overflow. Tensor by tensor: index_add is not deterministic.
        scales = [(part.abs() / len(part)).sum() for part in values.split(these.k)]
        return {
            "signs": pack((values >= 0).to(torch.uint8), 2),
            "scales": torch.stack(scales).to(torch.bfloat16),
            **encode_positions(chosen, these),
        }

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        scales = sound_scales(parts["scales"])
        these = kept(self.fraction, tuple(shapes), scales.device)
        chosen = decode_positions(parts, these)
        values = unpack(parts["signs"], 2, len(chosen)).float().mul_(2).sub_(1).mul_(scales[these.tensor])
        return scattered(values, chosen, these, shapes)
