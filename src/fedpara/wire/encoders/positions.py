"""The positions of the k numbers with the largest magnitude in each tensor, in few bits.

k = max(1, round(fraction n)) per tensor. The positions are a bitmap of n bits or Elias-Fano's code, whichever is
smaller for (n, k). Elias-Fano, of sorted positions p_0 < p_1 < ...:  the low l = floor(log2(n / k)) bits of each one,
and a bitmap of k + ceil(n / 2^l) - 1 bits with bit i + (p_i >> l) set. At 1% these are 8.6 bits per position.
The bits of all tensors follow one another: first all bitmaps, then all low bits.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.wire.encoders.bits import pack, packed_length, unpack
from fedpara.wire.encoders.core import Layout, Parts, reshaped


def position_layout(fraction: float, shapes: Sequence[torch.Size]) -> Layout:
    sizes = [_sizes(fraction, shape.numel()) for shape in shapes]
    low = sum(k * low for _, k, low, _ in sizes)
    return {
        "positions": (torch.uint8, packed_length(sum(high for *_, high in sizes), 2)),
        **({"low": (torch.uint8, packed_length(low, 2))} if low else {}),
    }


def largest(flat: Tensor, kept: "Kept") -> Tensor:
    """The ascending positions of the numbers to keep, in the joined tensors."""
    found = [
        part.topk(k, sorted=False).indices + start
        for part, k, start in zip(flat.abs().split(kept.n), kept.k, kept.starts, strict=True)
    ]
    return torch.cat(found).sort().values


def encode_positions(chosen: Tensor, kept: "Kept") -> Parts:
    position = chosen - kept.start
    bits = torch.zeros(kept.bits, dtype=torch.uint8, device=chosen.device)
    bits[kept.first_bit + (position >> kept.low) + kept.rank] = 1
    parts = {"positions": pack(bits, 2)}
    if not kept.widest:
        return parts
    low = (position[:, None] >> kept.places).bitwise_and_(1)[kept.places < kept.low[:, None]]
    return {**parts, "low": pack(low.to(torch.uint8), 2)}


def decode_positions(parts: Parts, kept: "Kept") -> Tensor:
    """The positions. WireError unless each tensor has k ascending ones."""
    count = sum(kept.k)
    found = unpack(parts["positions"], 2, kept.bits).nonzero().view(-1)
    if len(found) != count or bool(((found < kept.first_bit) | (found >= kept.end_bit)).any()):
        raise WireError(f"the bitmap of positions does not have the expected {count} bits set.")
    position = (found - kept.first_bit - kept.rank) << kept.low
    if kept.widest:
        used = kept.places < kept.low[:, None]
        low = torch.zeros(used.shape, dtype=torch.int64, device=used.device)
        low[used] = unpack(parts["low"], 2, int(used.sum())).long()
        position |= (low << kept.places).sum(1)
    chosen = position + kept.start
    if bool((position >= kept.size).any()) or bool((chosen.diff() <= 0).any()):
        raise WireError("the positions of a tensor are not ascending, or beyond its end.")
    return chosen


def scattered(values: Tensor, chosen: Tensor, kept: "Kept", shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Tensors with these values at their positions and zeros elsewhere."""
    whole = torch.zeros(sum(kept.n), device=values.device).index_copy_(0, chosen, values)
    return reshaped(whole.split(kept.n), shapes)


class Kept:
    """For each kept number, in the order of the message: facts about its tensor and its place there."""

    def __init__(self, fraction: float, shapes: tuple[torch.Size, ...], device: torch.device) -> None:
        sizes = [_sizes(fraction, shape.numel()) for shape in shapes]
        self.n, self.k, low, high = (list(column) for column in zip(*sizes, strict=True))
        self.starts, bits, ranks = _starts(self.n), _starts(high), _starts(self.k)
        counts = torch.tensor(self.k, device=device)

        def each(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device=device).repeat_interleave(counts)

        self.bits, self.widest = sum(high), max(low)
        self.start, self.size, self.low = each(self.starts), each(self.n), each(low)
        self.tensor = each(list(range(len(sizes))))
        self.first_bit = each(bits)
        self.end_bit = self.first_bit + each(high)
        # A plain bitmap has bit p_i set, not i + p_i.
        rank = torch.arange(sum(self.k), device=device) - each(ranks)
        self.rank = torch.where(each(high) == self.size, 0, rank)
        self.places = torch.arange(self.widest, device=device)


kept = lru_cache(maxsize=4)(Kept)


def count(fraction: float, n: int) -> int:
    """k of a tensor of n numbers."""
    return max(1, round(fraction * n))


def _sizes(fraction: float, n: int) -> tuple[int, int, int, int]:
    """(n, k, low bits per position, bits of the bitmap): n and no low bits where the plain bitmap is smaller."""
    k = count(fraction, n)
    low = (n // k).bit_length() - 1
    high = k + -(-n // (1 << low)) - 1
    return (n, k, low, high) if k * low + high < n else (n, k, 0, n)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
