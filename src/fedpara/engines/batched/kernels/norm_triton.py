"""The fused norms of `norm_ops.py` on a GPU, in Triton.

    z = (x - mean) / sqrt(variance + eps) weight + bias,   y = max(z, 0), or its maximum over squares of 2 x 2 pixels

A program has one image and a block of whole groups of channels, as [tap, pixel, channel]: the taps are the four pixels
of a square, or one. Sums are in float32. The forward pass reads all pixels once and keeps them in registers. The
backward pass goes through them twice, a few at a time: it sums, then it reads again what the caches still have, and
writes. So many programs run at a time, which hides how long each waits for the memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedpara.engines.batched.kernels.norm_ops import block, power

TILES = {1: 2048, 4: 1024}
"""By taps: maxima whose gradients a program has at a time, 8 per thread, so that a thread reads 16 bytes per tap."""


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
    """(x - mean) / deviation, the mean, and 1 / deviation"""
    mean = _sums(x, SIZE, CB) / count
    shifted = tl.where(inside[None, :, :], x - mean, 0.0)
    scale = tl.rsqrt(_sums(shifted * shifted, SIZE, CB) / count + eps)
    return shifted * scale, mean, scale


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    stats: tl.tensor,
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
    hat, mean, scale = _normalised(values, inside, SIZE * H * W, eps, SIZE, CB)
    channels = start + tl.arange(0, CB)
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    tl.store(group, mean.reshape(CB), channels % SIZE == 0)
    tl.store(group + C // SIZE, scale.reshape(CB), channels % SIZE == 0)
    at = image // BATCH * C + channels
    z = (
        hat * tl.load(weight + at).to(tl.float32)[None, None, :]
        + tl.load(bias + at).to(tl.float32)[None, None, :]
    )
    top = tl.maximum(tl.max(z, 0), 0.0)
    tl.store(y + image * (C * H * W // TAPS) + start + results, top.to(y.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _chosen(
    x: tl.tensor,
    dy: tl.tensor,
    inside: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    w: tl.tensor,
    b: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Which tap is the maximum, its hat, and its dz, [pixel, channel]; x points to the first taps.

    Of maxima that are equal after rounding, the first gets the gradient, as in torch.
    """
    top = tl.full(x.shape, float("-inf"), tl.float32)
    hat = tl.zeros(x.shape, tl.float32)
    tap = tl.zeros(x.shape, tl.int32)
    for t in tl.static_range(TAPS):
        one = _hat(x, inside, mean, scale, t, C, W)
        z = one * w + b
        if TAPS > 1:
            z = z.to(x.dtype.element_ty).to(tl.float32)
        higher = z > top
        top, hat, tap = tl.where(higher, z, top), tl.where(higher, one, hat), tl.where(higher, t, tap)
    return tap, hat, tl.where(top > 0.0, tl.load(dy, inside, 0.0).to(tl.float32), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _hat(
    x: tl.tensor,
    inside: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    t: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
) -> tl.tensor:
    """(x - mean) / deviation at tap t"""
    return (tl.load(x + (t // 2 * W + t % 2) * C, inside, 0.0).to(tl.float32) - mean) * scale


@triton.jit  # type: ignore[untyped-decorator]
def _backward(
    x: tl.tensor,
    dy: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stats: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    count: int,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """parts is [image, 2, channel]: its share of the gradients of weight and bias. `count` pixels have a dy.

    The count is not a constant, so that the loops are not unrolled, which takes registers.
    """
    side: tl.constexpr = 2 if TAPS == 4 else 1
    wide: tl.constexpr = W // side
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    channels = start + tl.arange(0, CB)
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    mean, scale = tl.load(group)[None, :], tl.load(group + C // SIZE)[None, :]
    w = tl.load(weight + image // BATCH * C + channels).to(tl.float32)[None, :]
    b = tl.load(bias + image // BATCH * C + channels).to(tl.float32)[None, :]
    x += image * (C * H * W) + channels[None, :]
    dx += image * (C * H * W) + channels[None, :]
    dy += image * (C * H * W // TAPS) + channels[None, :]
    dz_hat = tl.zeros((PIXELS, CB), tl.float32)
    dz_sum = tl.zeros((PIXELS, CB), tl.float32)
    for first in range(0, count, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        at, inside = (p // wide * W + p % wide) * (side * C), (p < count) & (channels >= 0)[None, :]
        tap, hat, dz = _chosen(x + at, dy + p * C, inside, mean, scale, w, b, C, W, TAPS)
        dz_hat += dz * hat
        dz_sum += dz
    dweight, dbias = tl.sum(dz_hat, 0), tl.sum(dz_sum, 0)
    tl.store(parts + image * (2 * C) + channels, dweight)
    tl.store(parts + image * (2 * C) + C + channels, dbias)
    n = SIZE * H * W
    g_hat = _sums((dweight[None, :] * w)[None, :, :], SIZE, CB).reshape(1, CB) / n
    g_sum = _sums((dbias[None, :] * w)[None, :, :], SIZE, CB).reshape(1, CB) / n
    for first in range(0, count, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        at, inside = (p // wide * W + p % wide) * (side * C), (p < count) & (channels >= 0)[None, :]
        tap, hat, dz = _chosen(x + at, dy + p * C, inside, mean, scale, w, b, C, W, TAPS)
        for t in tl.static_range(TAPS):
            if TAPS > 1:
                hat = _hat(x + at, inside, mean, scale, t, C, W)
            d = (tl.where(tap == t, dz * w, 0.0) - g_sum - hat * g_hat) * scale
            tl.store(dx + at + (t // 2 * W + t % 2) * C, d.to(dx.dtype.element_ty), inside)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool
) -> tuple[Tensor, Tensor]:
    """x [l, b, h, w, c], weight and bias [l, c] to y, as x or half as high and wide, and stats [l, b, 2, g]"""
    lanes, batch, h, w, c = x.shape
    y = x.new_empty((lanes, batch, h // 2, w // 2, c) if pool else x.shape)
    stats = torch.empty((lanes, batch, 2, groups), dtype=torch.float32, device=x.device)
    size, taps = c // groups, 4 if pool else 1
    channels, pixels = _channels(c, h, w, size), power(h * w // taps)
    warps = max(1, min(8, channels * pixels * taps // 2048))
    with torch.cuda.device_of(x):
        _forward[(lanes * batch * (c // channels),)](
            x, weight, bias, y, stats, eps, batch, c, h, w, size, channels, pixels, taps, num_warps=warps
        )  # fmt: skip
    return y, stats


def backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor,
    stats: Tensor,
    groups: int,
    pool: bool,
    channels: int | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight and bias image by image, [l, b, 2, c]

    A program has this many channels, and the gradients of `tile` maxima at a time.
    """
    lanes, batch, h, w, c = x.shape
    dx, parts = torch.empty_like(x), torch.empty((lanes, batch, 2, c), dtype=torch.float32, device=x.device)
    size, taps = c // groups, 4 if pool else 1
    channels = channels or _channels(c, h, w, size)
    pixels = min(power(h * w // taps), max(1, (tile or TILES[taps]) // channels))
    warps = max(1, channels * pixels // 256)
    with torch.cuda.device_of(x):
        _backward[(lanes * batch * (c // channels),)](
            x, dy, weight, bias, stats, dx, parts, h * w // taps, batch, c, h, w, size, channels, pixels, taps,
            num_warps=warps
        )  # fmt: skip
    return dx, parts


def _channels(c: int, h: int, w: int, size: int) -> int:
    channels = block(c, h, w, size)
    assert channels is not None
    return channels
