"""The fused norms of `norm_ops.py` on a GPU, in Triton.

    z = hat weight + bias,   hat = (x - mean) / sqrt(variance + eps)
    y = max(z, 0), or its maximum over the four taps of a square of 2 x 2 pixels

A program processes one image and a block of whole groups of channels. It passes over the pixels several times, a few
at a time: first for the sums, in float32, and last to write. Repeated reads mostly hit the caches. A program needs few
registers, so many programs run at a time, which hides memory latency.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedpara.engines.batched.kernels.norm_ops import block, power

TILES = {1: 2048, 4: 1024}
"""Output values that a program computes at a time, by number of taps. A thread has 8, and reads 16 bytes per tap."""


@triton.jit  # type: ignore[untyped-decorator]
def _group_sums(values: tl.tensor, SIZE: tl.constexpr, CB: tl.constexpr) -> tl.tensor:
    """Sums [1, channel] over groups of SIZE channels, of values [pixel, channel]."""
    groups = tl.sum(tl.sum(values, 0).reshape(CB // SIZE, SIZE), 1)
    return tl.broadcast_to(groups[:, None], (CB // SIZE, SIZE)).reshape(1, CB)


@triton.jit  # type: ignore[untyped-decorator]
def _first_tap(p: tl.tensor, C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr) -> tl.tensor:
    """Where in the image the first tap of the result's pixel p is."""
    side: tl.constexpr = 2 if TAPS == 4 else 1
    wide: tl.constexpr = W // side
    return (p // wide * W + p % wide) * (side * C)


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
    """hat at tap t; x points to the first taps"""
    return (tl.load(x + (t // 2 * W + t % 2) * C, inside, 0.0).to(tl.float32) - mean) * scale


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    stats: tl.tensor,
    count: int,
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
    """stats is [image, 2, group]: means and 1 / deviations. The result has `count` pixels.

    The count is a run-time argument, so that the compiler does not unroll the loops: that would need more registers.
    """
    ROWS: tl.constexpr = TAPS * PIXELS
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    channels = start + tl.arange(0, CB)
    x += image * (C * H * W) + channels[None, :]
    y += image * (C * H * W // TAPS) + channels[None, :]
    n = SIZE * H * W
    total = tl.zeros((ROWS, CB), tl.float32)
    for first in range(0, TAPS * count, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        inside = (p < TAPS * count) & (channels >= 0)[None, :]
        total += tl.load(x + p * C, inside, 0.0).to(tl.float32)
    mean = _group_sums(total, SIZE, CB) / n
    total = tl.zeros((ROWS, CB), tl.float32)
    for first in range(0, TAPS * count, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        inside = (p < TAPS * count) & (channels >= 0)[None, :]
        shifted = tl.where(inside, tl.load(x + p * C, inside, 0.0).to(tl.float32) - mean, 0.0)
        total += shifted * shifted
    scale = tl.rsqrt(_group_sums(total, SIZE, CB) / n + eps)
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    tl.store(group, mean.reshape(CB), channels % SIZE == 0)
    tl.store(group + C // SIZE, scale.reshape(CB), channels % SIZE == 0)
    w = tl.load(weight + image // BATCH * C + channels).to(tl.float32)[None, :]
    b = tl.load(bias + image // BATCH * C + channels).to(tl.float32)[None, :]
    for first in range(0, count, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        inside = (p < count) & (channels >= 0)[None, :]
        at = _first_tap(p, C, W, TAPS)
        top = tl.zeros((PIXELS, CB), tl.float32)
        for t in tl.static_range(TAPS):
            top = tl.maximum(top, _hat(x + at, inside, mean, scale, t, C, W) * w + b)
        tl.store(y + p * C, top.to(y.dtype.element_ty), inside)


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
    """parts is [image, 2, channel]: its share of the gradients of weight and bias."""
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
        inside = (p < count) & (channels >= 0)[None, :]
        at = _first_tap(p, C, W, TAPS)
        _, hat, dz = _chosen(x + at, dy + p * C, inside, mean, scale, w, b, C, W, TAPS)
        dz_hat += dz * hat
        dz_sum += dz
    tl.store(parts + image * (2 * C) + channels, tl.sum(dz_hat, 0))
    tl.store(parts + image * (2 * C) + C + channels, tl.sum(dz_sum, 0))
    n = SIZE * H * W
    g_hat, g = _group_sums(dz_hat * w, SIZE, CB) / n, _group_sums(dz_sum * w, SIZE, CB) / n
    for first in range(0, count, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        inside = (p < count) & (channels >= 0)[None, :]
        at = _first_tap(p, C, W, TAPS)
        tap, hat, dz = _chosen(x + at, dy + p * C, inside, mean, scale, w, b, C, W, TAPS)
        for t in tl.static_range(TAPS):
            if TAPS > 1:
                hat = _hat(x + at, inside, mean, scale, t, C, W)
            d = (tl.where(tap == t, dz * w, 0.0) - g - hat * g_hat) * scale
            tl.store(dx + at + (t // 2 * W + t % 2) * C, d.to(dx.dtype.element_ty), inside)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    pool: bool,
    channels: int | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """x [l, b, h, w, c], weight and bias [l, c] to y, as x or half as high and wide, and stats [l, b, 2, g]

    A program processes `channels` channels, and computes `tile` output values at a time.
    """
    lanes, batch, h, w, c = x.shape
    y = x.new_empty((lanes, batch, h // 2, w // 2, c) if pool else x.shape)
    stats = torch.empty((lanes, batch, 2, groups), dtype=torch.float32, device=x.device)
    count, blocks, warps = _sizes(x, groups, pool, channels, tile)
    with torch.cuda.device_of(x):
        _forward[(lanes * batch * (c // blocks["CB"]),)](
            x, weight, bias, y, stats, count, eps, batch, c, h, w, **blocks, num_warps=warps
        )
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
    """dx, and the gradients of weight and bias image by image, [l, b, 2, c]"""
    lanes, batch, h, w, c = x.shape
    dx, parts = torch.empty_like(x), torch.empty((lanes, batch, 2, c), dtype=torch.float32, device=x.device)
    count, blocks, warps = _sizes(x, groups, pool, channels, tile)
    with torch.cuda.device_of(x):
        _backward[(lanes * batch * (c // blocks["CB"]),)](
            x, dy, weight, bias, stats, dx, parts, count, batch, c, h, w, **blocks, num_warps=warps
        )
    return dx, parts


def _sizes(
    x: Tensor, groups: int, pool: bool, channels: int | None, tile: int | None
) -> tuple[int, dict[str, int], int]:
    """The pixels of the result, the sizes of a program's blocks, and its warps."""
    h, w, c = x.shape[2:]
    size, taps = c // groups, 4 if pool else 1
    channels = channels or block(c, h, w, size)
    assert channels is not None
    count = h * w // taps
    pixels = min(power(count), max(1, (tile or TILES[taps]) // channels))
    blocks = {"SIZE": size, "CB": channels, "PIXELS": pixels, "TAPS": taps}
    return count, blocks, max(1, channels * pixels // 256)
