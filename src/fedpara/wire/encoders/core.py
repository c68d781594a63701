"""Encoder: how a lossy link writes one tensor as a few flat wire tensors, and reads them back.

Both ends know the shape, so the types and lengths of the wire tensors are known before a message arrives. A decoder
takes no size from the message, and rejects every value that its encoder could not have written.
"""

from typing import Protocol

import torch
from torch import Tensor

from fedpara.errors import UpdateRejected

Layout = dict[str, tuple[torch.dtype, int]]
"""Types and lengths of the wire tensors, by the name of the part."""
Parts = dict[str, Tensor]

SMALL = 256
"""Tensors with fewer numbers travel as float32: biases and norms are few, and sensitive."""
LARGEST = 3.38e38
"""Slightly below the largest bfloat16: a scale must not round to infinity."""


class Encoder(Protocol):
    @property
    def text(self) -> str:
        """The encoder with all its options, such as int4(block=128): both ends compare it."""

    def layout(self, shape: torch.Size) -> Layout:
        """The wire tensors of a tensor of this shape."""

    def encode(self, x: Tensor, generator: torch.Generator) -> Parts:
        """The wire tensors of the finite float32 tensor `x`, on its device."""

    def decode(self, parts: Parts, shape: torch.Size) -> Tensor:
        """The float32 tensor. The parts have the types and lengths of the layout; WireError for a wrong value."""


def codes(encoder: Encoder, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a tensor is encoded, decided by its size: otherwise it travels as float32."""
    if not dtype.is_floating_point or shape.numel() < SMALL:
        return False
    return sum(kind.itemsize * length for kind, length in encoder.layout(shape).values()) < 4 * shape.numel()


def rows(x: Tensor, width: int) -> Tensor:
    """The numbers of `x` as [row, width]; zeros fill the last row."""
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % width)).view(-1, width)


def refuse_unsendable(name: str, x: Tensor, text: str) -> None:
    """UpdateRejected for NaN, infinity, or values that no scale holds."""
    low, high = (float(end) for end in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    if not max(abs(low), abs(high)) <= LARGEST:
        raise UpdateRejected(
            f"tensor {name!r} spans {low:.4g} to {high:.4g}: expected finite values within ±{LARGEST:.4g} "
            f"to be sent as {text}. Clip the update, or use a wider link."
        )
