"""OneByOne: an encoder that treats each tensor alone; their wire tensors are joined by part."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedpara.wire.encoders.core import Layout, Parts


class OneByOne(Protocol):
    def layout_one(self, shape: torch.Size) -> Layout: ...

    def encode_one(self, x: Tensor, generator: torch.Generator) -> Parts: ...

    def decode_one(self, parts: Parts, shape: torch.Size) -> Tensor: ...

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        joined: Layout = {}
        for shape in shapes:
            for part, (dtype, length) in self.layout_one(shape).items():
                joined[part] = dtype, length + joined.get(part, (dtype, 0))[1]
        return joined

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        joined: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            for part, wire in self.encode_one(tensor, generator).items():
                joined.setdefault(part, []).append(wire)
        return {part: torch.cat(wires) for part, wires in joined.items()}

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        made, start = [], dict.fromkeys(parts, 0)
        for shape in shapes:
            layout = self.layout_one(shape)
            these = {part: parts[part][start[part] : start[part] + n] for part, (_, n) in layout.items()}
            start |= {part: start[part] + length for part, (_, length) in layout.items()}
            made.append(self.decode_one(these, shape))
        return made
