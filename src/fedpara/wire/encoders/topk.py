"""topk: the numbers with the largest magnitude, in bfloat16, and their positions. Biased: use error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.wire.encoders.core import Layout, Parts
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
class TopK:
    fraction: float

    @property
    def text(self) -> str:
        return f"topk({self.fraction!r})"

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        values = sum(count(self.fraction, shape.numel()) for shape in shapes)
        return {"values": (torch.bfloat16, values), **position_layout(self.fraction, shapes)}

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        return 0

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        these = kept(self.fraction, tuple(tensor.shape for tensor in tensors), flat.device)
        chosen = largest(flat, these)
        return {"values": flat[chosen].to(torch.bfloat16), **encode_positions(chosen, these)}

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        values = parts["values"].float()
        these = kept(self.fraction, tuple(shapes), values.device)
        chosen = decode_positions(parts, these)
        if not bool(values.isfinite().all()):
            raise WireError("a value is infinite or not a number: expected finite values.")
        return scattered(values, chosen, these, shapes)
