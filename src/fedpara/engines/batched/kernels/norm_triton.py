"""The fused norms of `norm_ops.py` on a GPU, in Triton: one read of the image, everything else in registers.

    z = (x - mean) / sqrt(variance + eps) weight + bias,   y = max(z, 0), or its maximum over squares of 2 x 2 pixels

A program has all pixels of one image and a block of whole groups of channels, as [tap, pixel, channel]: the taps are
the four pixels of a square, or one. Sums are in float32. The backward pass reads x and dy, and computes the rest again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedpara.engines.batched.kernels.norm_ops import block, power


@triton.jit  # type: ignore[untyped-decorator]
def _places(
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Offsets [tap, pixel, channel] in an image, whether each is inside, and those of the result, [pixel, channel]."""
    side: tl.constexpr = 2 if TAPS == 4 else 1
    wide: tl.constexpr = W // side
    c = tl.arange(0, CB)
    p = tl.arange(0, PIXELS)
    t = tl.arange(0, TAPS)[:, None]
    i = p[None, :] // wide * side + t // side
    j = p[None, :] % wide * side + t % side
    inside = (p < H * W // TAPS)[:, None] & (c >= 0)[None, :]
    return (i * W + j)[:, :, None] * C + c[None, None, :], inside, p[:, None] * C + c[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _sums(values: tl.tensor, SIZE: tl.constexpr, CB: tl.constexpr) -> tl.tensor:
    """Sums over groups of SIZE channels, [1, 1, channel], of values [tap, pixel, channel]."""
    sums = tl.sum(tl.sum(values, 0), 0)
    groups = tl.sum(sums.reshape(CB // SIZE, SIZE), 1)
    return tl.broadcast_to(groups[:, None], (CB // SIZE, SIZE)).reshape(1, 1, CB)


@triton.jit  # type: ignore[untyped-decorator]
def _normalised(
    x: tl.tensor, inside: tl.tensor, count: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, CB: tl.constexpr
) -> tl.tensor:
    """(x - mean) / deviation, and 1 / deviation"""
    shifted = tl.where(inside[None, :, :], x - _sums(x, SIZE, CB) / count, 0.0)
    scale = tl.rsqrt(_sums(shifted * shifted, SIZE, CB) / count + eps)
    return shifted * scale, scale


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    eps: float,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    places, inside, results = _places(C, H, W, CB, PIXELS, TAPS)
    values = tl.load(x + image * (C * H * W) + start + places, inside[None, :, :], 0.0).to(tl.float32)
    hat, _ = _normalised(values, inside, SIZE * H * W, eps, SIZE, CB)
    at = image // BATCH * C + start + tl.arange(0, CB)
    z = (
        hat * tl.load(weight + at).to(tl.float32)[None, None, :]
        + tl.load(bias + at).to(tl.float32)[None, None, :]
    )
    top = tl.maximum(tl.max(z, 0), 0.0)
    tl.store(y + image * (C * H * W // TAPS) + start + results, top.to(y.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(
    x: tl.tensor,
    dy: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    eps: float,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """parts is [image, 2, channel]: its share of the gradients of weight and bias.

    Of equal maxima, as they are after rounding, the first gets the gradient, as in torch.
    """
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    places, inside, results = _places(C, H, W, CB, PIXELS, TAPS)
    values = tl.load(x + image * (C * H * W) + start + places, inside[None, :, :], 0.0).to(tl.float32)
    upstream = tl.load(dy + image * (C * H * W // TAPS) + start + results, inside, 0.0).to(tl.float32)
    hat, scale = _normalised(values, inside, SIZE * H * W, eps, SIZE, CB)
    channels = start + tl.arange(0, CB)
    w = tl.load(weight + image // BATCH * C + channels).to(tl.float32)[None, None, :]
    z = hat * w + tl.load(bias + image // BATCH * C + channels).to(tl.float32)[None, None, :]
    kept = z > 0.0
    if TAPS > 1:
        rounded = z.to(dx.dtype.element_ty).to(tl.float32)
        tap = tl.arange(0, TAPS)[:, None, None]
        first = tl.min(tl.where(rounded == tl.max(rounded, 0)[None, :, :], tap, TAPS), 0)
        kept = kept & (tap == first[None, :, :])
    dz = tl.where(kept, upstream[None, :, :], 0.0)
    at = parts + image * (2 * C) + channels
    tl.store(at, tl.sum(tl.sum(dz * hat, 0), 0))
    tl.store(at + C, tl.sum(tl.sum(dz, 0), 0))
    g = dz * w
    n = SIZE * H * W
    d = (g - _sums(g, SIZE, CB) / n - hat * (_sums(g * hat, SIZE, CB) / n)) * scale
    tl.store(dx + image * (C * H * W) + start + places, d.to(dx.dtype.element_ty), inside[None, :, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool) -> Tensor:
    """x [l, b, h, w, c], weight and bias [l, c] to [l, b, h, w, c], or [l, b, h / 2, w / 2, c]"""
    lanes, batch, h, w, c = x.shape
    y = x.new_empty((lanes, batch, h // 2, w // 2, c) if pool else x.shape)
    size = c // groups
    channels, pixels, taps, warps = _sizes(c, h, w, size, pool)
    with torch.cuda.device_of(x):
        _forward[(lanes * batch * (c // channels),)](
            x, weight, bias, y, eps, batch, c, h, w, size, channels, pixels, taps, num_warps=warps
        )  # fmt: skip
    return y


def backward(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight and bias image by image, [l, b, 2, c]"""
    lanes, batch, h, w, c = x.shape
    dx, parts = torch.empty_like(x), torch.empty((lanes, batch, 2, c), dtype=torch.float32, device=x.device)
    size = c // groups
    channels, pixels, taps, warps = _sizes(c, h, w, size, pool)
    with torch.cuda.device_of(x):
        _backward[(lanes * batch * (c // channels),)](
            x, dy, weight, bias, dx, parts, eps, batch, c, h, w, size, channels, pixels, taps, num_warps=2 * warps
        )  # fmt: skip
    return dx, parts


def _sizes(c: int, h: int, w: int, size: int, pool: bool) -> tuple[int, int, int, int]:
    """Channels of a block, pixels (of the result), taps and warps."""
    channels, taps = block(c, h, w, size), 4 if pool else 1
    assert channels is not None
    pixels = power(h * w // taps)
    return channels, pixels, taps, max(1, min(8, channels * pixels * taps // 2048))
