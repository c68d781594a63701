"""Sums over one dimension, in one pass and rounded once.

They are over the parts into which a kernel split a product, or over the images of a lane. torch takes a pass for the
sum and one to round it, and its compiler reads few numbers at a time where a sum's terms are far apart.
"""

from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGE = 1 << 18
"""Sums enough to keep a GPU busy with many per program."""


@triton.jit  # type: ignore[untyped-decorator]
def _sum(
    parts: tl.tensor,
    y: tl.tensor,
    inner: int,
    TERMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    """parts is [outer, TERMS, inner]. AT_ONCE terms are loaded before the first is needed."""
    blocks = tl.cdiv(inner, COUNT)
    program = tl.program_id(0).to(tl.int64)
    outer, i = program // blocks, program % blocks * COUNT + tl.arange(0, COUNT)
    parts += outer * inner * TERMS + i
    total = tl.zeros((COUNT,), tl.float32)
    for first in range(0, TERMS, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            inside = (i < inner) & (first + k < TERMS)
            total += tl.load(parts + (first + k) * inner, inside, 0.0)
    tl.store(y + outer * inner + i, total.to(y.dtype.element_ty), i < inner)


def parts_for(split: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """Room for `split` parts of a tensor of this shape: float32, or the type of `like` if there is only one."""
    return like.new_empty((split, *shape), dtype=like.dtype if split == 1 else torch.float32)


def sum_of(parts: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The sum over a dimension. A single term is returned as it is."""
    if parts.shape[dim] == 1:
        return parts.select(dim, 0)
    outer, terms, inner = prod(parts.shape[:dim]), parts.shape[dim], prod(parts.shape[dim + 1 :])
    y = parts.new_empty((*parts.shape[:dim], *parts.shape[dim + 1 :]), dtype=dtype)
    count, warps = (1024, 4) if y.numel() >= LARGE else (128, 1)
    at_once = min(16, 1 << (terms - 1).bit_length())
    with torch.cuda.device_of(parts):
        _sum[(outer * triton.cdiv(inner, count),)](parts, y, inner, terms, at_once, count, num_warps=warps)
    return y
