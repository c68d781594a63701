"""Encoder: how a lossy link writes tensors as a few flat wire tensors, and reads them back.

It gets all tensors of a message at once: a hundred small tensors joined are encoded as fast as one large one. Both ends
know the shapes, so the types and (largest) lengths of the wire tensors are known before a message arrives.
A decoder takes no size from the message, and rejects every value that its encoder could not have written.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fedpara.errors import UpdateRejected


class AtMost(int):
    """The largest possible length of a wire tensor whose length depends on the numbers."""


Layout = dict[str, tuple[torch.dtype, int]]
"""Types and lengths of the wire tensors, by the name of the part."""
Parts = dict[str, Tensor]

SMALL = 256
"""Smaller tensors are sent as float32: biases and norms are small, and sensitive to errors."""
LARGEST = 3.38e38
"""Slightly below the largest bfloat16: a scale must not round to infinity."""


class Encoder(Protocol):
    def __hash__(self) -> int: ...

    @property
    def text(self) -> str:
        """The encoder with all its options, such as int4(block=128): both ends compare it."""

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        """The wire tensors of tensors of these shapes."""

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        """How many uniform numbers `encode` draws for tensors of these shapes (`draws.uniform`)."""

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        """The wire tensors of one or more finite float32 tensors, on their device."""

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The float32 tensors. The parts have the types and lengths of the layout; WireError for a wrong value."""


@lru_cache(maxsize=4096)
def codes(encoder: Encoder, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a tensor is encoded: it must be large, and smaller when encoded. Otherwise it is sent as float32."""
    if not dtype.is_floating_point or shape.numel() < SMALL:
        return False
    return (
        sum(kind.itemsize * length for kind, length in encoder.layout([shape]).values()) < 4 * shape.numel()
    )


def in_rows(tensors: Iterable[Tensor], width: int) -> Tensor:
    """The numbers of all tensors as [row, width]. Each tensor begins a row; zeros fill its last one."""
    pieces: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        pieces += [flat, flat.new_zeros(-flat.numel() % width)]
    return torch.cat(pieces).view(-1, width)


def from_rows(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The inverse of `in_rows`: flat tensors of `counts` numbers."""
    width = rows.shape[1]
    pieces = rows.reshape(-1).split([size for count in counts for size in (count, -count % width)])
    return list(pieces[::2])


def reshaped(flat: Iterable[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [one.view(shape) for one, shape in zip(flat, shapes, strict=True)]


def refuse_unsendable(state: Mapping[str, Tensor], text: str) -> None:
    """UpdateRejected, with the name of the tensor, for NaN, infinity, or values that are too large for a scale."""
    if not state or _spans(torch.cat([tensor.reshape(-1) for tensor in state.values()]))[2]:
        return
    for name, tensor in state.items():
        low, high, fits = _spans(tensor)
        if not fits:
            raise UpdateRejected(
                f"tensor {name!r} spans {low:.4g} to {high:.4g}: expected finite values within ±{LARGEST:.4g} "
                f"to be sent as {text}. Clip the update, or use a wider link."
            )


def _spans(x: Tensor) -> tuple[float, float, bool]:
    """(the smallest number, the largest, whether every link can send both)"""
    low, high = (float(end) for end in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    return low, high, max(abs(low), abs(high)) <= LARGEST
