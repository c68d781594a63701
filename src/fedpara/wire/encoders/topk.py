"""topk: the k numbers with the largest magnitude, in bfloat16, and their positions. Biased: use error feedback.

k = max(1, round(fraction n)) per tensor. The positions are a bitmap of n bits or Elias-Fano's code, whichever is
smaller for (n, k). Elias-Fano, of sorted positions p_0 < p_1 < ...:  the low l = floor(log2(n / k)) bits of each one,
and a bitmap of k + ceil(n / 2^l) - 1 bits with bit i + (p_i >> l) set. At 1% these are 8.6 bits per position.
The bits of all tensors follow one another: first all bitmaps, then all low bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.wire.encoders.bits import pack, packed_length, unpack
from fedpara.wire.encoders.core import Layout, Parts, reshaped


@dataclass(frozen=True)
class TopK:
    fraction: float

    @property
    def text(self) -> str:
        return f"topk({self.fraction!r})"

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        sizes = [_sizes(self.fraction, shape.numel()) for shape in shapes]
        low = sum(k * low for _, k, low, _ in sizes)
        return {
            "values": (torch.bfloat16, sum(k for _, k, _, _ in sizes)),
            "positions": (torch.uint8, packed_length(sum(high for *_, high in sizes), 2)),
            **({"low": (torch.uint8, packed_length(low, 2))} if low else {}),
        }

    def uniforms(self, shapes: Sequence[torch.Size]) -> int:
        return 0

    def encode(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Parts:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        kept = _kept(self.fraction, tuple(tensor.shape for tensor in tensors), flat.device)
        found = [
            part.topk(k, sorted=False).indices + start
            for part, k, start in zip(flat.abs().split(kept.n), kept.k, kept.starts, strict=True)
        ]
        chosen = torch.cat(found).sort().values
        position = chosen - kept.start
        bits = torch.zeros(kept.bits, dtype=torch.uint8, device=flat.device)
        bits[kept.first_bit + (position >> kept.low) + kept.rank] = 1
        parts = {"values": flat[chosen].to(torch.bfloat16), "positions": pack(bits, 2)}
        if not kept.widest:
            return parts
        low = (position[:, None] >> kept.places).bitwise_and_(1)[kept.places < kept.low[:, None]]
        return {**parts, "low": pack(low.to(torch.uint8), 2)}

    def decode(self, parts: Parts, shapes: Sequence[torch.Size]) -> list[Tensor]:
        values = parts["values"].float()
        kept = _kept(self.fraction, tuple(shapes), values.device)
        found = unpack(parts["positions"], 2, kept.bits).nonzero().view(-1)
        if len(found) != len(values) or bool(((found < kept.first_bit) | (found >= kept.end_bit)).any()):
            raise WireError(f"the bitmap of positions does not have the expected {len(values)} bits set.")
        position = (found - kept.first_bit - kept.rank) << kept.low
        if kept.widest:
            used = kept.places < kept.low[:, None]
            low = torch.zeros(used.shape, dtype=torch.int64, device=used.device)
            low[used] = unpack(parts["low"], 2, int(used.sum())).long()
            position |= (low << kept.places).sum(1)
        chosen = position + kept.start
        if bool((position >= kept.size).any()) or bool((chosen.diff() <= 0).any()):
            raise WireError("the positions of a tensor are not ascending, or beyond its end.")
        if not bool(values.isfinite().all()):
            raise WireError("a value is infinite or not a number: expected finite values.")
        whole = torch.zeros(sum(kept.n), device=values.device).index_copy_(0, chosen, values)
        return reshaped(whole.split(kept.n), shapes)


class _Kept:
    """For each number that is kept, in the order of the message: facts about its tensor and its place in it."""

    def __init__(self, fraction: float, shapes: tuple[torch.Size, ...], device: torch.device) -> None:
        sizes = [_sizes(fraction, shape.numel()) for shape in shapes]
        self.n, self.k, low, high = (list(column) for column in zip(*sizes, strict=True))
        self.starts, bits, ranks = _starts(self.n), _starts(high), _starts(self.k)
        counts = torch.tensor(self.k, device=device)

        def each(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device=device).repeat_interleave(counts)

        self.bits, self.widest = sum(high), max(low)
        self.start, self.size, self.low = each(self.starts), each(self.n), each(low)
        self.first_bit = each(bits)
        self.end_bit = self.first_bit + each(high)
        # A plain bitmap has bit p_i set, not i + p_i.
        rank = torch.arange(sum(self.k), device=device) - each(ranks)
        self.rank = torch.where(each(high) == self.size, 0, rank)
        self.places = torch.arange(self.widest, device=device)


_kept = lru_cache(maxsize=4)(_Kept)


def _sizes(fraction: float, n: int) -> tuple[int, int, int, int]:
    """(n, k, low bits per position, bits of the bitmap): n and no low bits where the plain bitmap is smaller."""
    k = max(1, round(fraction * n))
    low = (n // k).bit_length() - 1
    high = k + -(-n // (1 << low)) - 1
    return (n, k, low, high) if k * low + high < n else (n, k, 0, n)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
