"""The fused norms of `norm_ops.py` on a GPU, in Triton.

    z = hat weight + bias,   hat = (x - centre) / sqrt(variance + eps),   centre = mean - offset, per channel
    y = max(z, 0), or its maximum over the four taps of a square of 2 x 2 pixels

A program processes one image and a block of whole groups of channels. It passes over the pixels several times, a few
at a time: first for the sums, in float32, and last to write. Repeated reads mostly hit the caches. This is for images
that do not fit in registers (`gpu/norm_once.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedpara.engines.batched.kernels.gpu.sums import sum_of
from fedpara.engines.batched.kernels.norm_ops import block, power

TILES = {1: 2048, 4: 1024}
"""Output values that a program computes at a time, by number of taps. A thread has 8, and reads 16 bytes per tap."""


@triton.jit  # type: ignore[untyped-decorator]
def _group_sums(values: tl.tensor, SIZE: tl.constexpr, CB: tl.constexpr) -> tl.tensor:
    """For each of CB channels the sum of its group of SIZE."""
    groups = tl.sum(values.reshape(CB // SIZE, SIZE), 1)
    return tl.broadcast_to(groups[:, None], (CB // SIZE, SIZE)).reshape(CB)


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
    centre: tl.tensor,
    scale: tl.tensor,
    t: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
) -> tl.tensor:
    """hat at tap t; x points to the first taps"""
    return (tl.load(x + (t // 2 * W + t % 2) * C, inside, 0.0).to(tl.float32) - centre) * scale


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
    x: tl.tensor,
    offset: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    stats: tl.tensor,
    totals: tl.tensor,
    count: int,
    eps: float,
    OFFSET: tl.constexpr,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """stats is [image, 2, group]: means and 1 / deviations; totals [image, channel]. The result has `count` pixels.

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
    of_channel = tl.sum(total, 0)
    tl.store(totals + image * C + channels, of_channel)
    moved = tl.zeros((CB,), tl.float32)
    if OFFSET:
        moved = tl.load(offset + image // BATCH * C + channels).to(tl.float32)
    mean = _group_sums(of_channel + moved * (H * W), SIZE, CB) / n
    centre = (mean - moved)[None, :]
    total = tl.zeros((ROWS, CB), tl.float32)
    for first in range(0, TAPS * count, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        inside = (p < TAPS * count) & (channels >= 0)[None, :]
        shifted = tl.where(inside, tl.load(x + p * C, inside, 0.0).to(tl.float32) - centre, 0.0)
        total += shifted * shifted
    scales = tl.rsqrt(_group_sums(tl.sum(total, 0), SIZE, CB) / n + eps)
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    tl.store(group, mean, channels % SIZE == 0)
    tl.store(group + C // SIZE, scales, channels % SIZE == 0)
    scale = scales[None, :]
    w = tl.load(weight + image // BATCH * C + channels).to(tl.float32)[None, :]
    b = tl.load(bias + image // BATCH * C + channels).to(tl.float32)[None, :]
    for first in range(0, count, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        inside = (p < count) & (channels >= 0)[None, :]
        at = _first_tap(p, C, W, TAPS)
        top = tl.zeros((PIXELS, CB), tl.float32)
        for t in tl.static_range(TAPS):
            top = tl.maximum(top, _hat(x + at, inside, centre, scale, t, C, W) * w + b)
        tl.store(y + p * C, top.to(y.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _chosen(
    x: tl.tensor,
    dy: tl.tensor,
    inside: tl.tensor,
    centre: tl.tensor,
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
        one = _hat(x, inside, centre, scale, t, C, W)
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
    offset: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stats: tl.tensor,
    totals: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    count: int,
    OFFSET: tl.constexpr,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """parts is [image, 3, channel]: its share of the gradients of weight, bias and offset."""
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    channels = start + tl.arange(0, CB)
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    centre1, scale1 = tl.load(group), tl.load(group + C // SIZE)
    if OFFSET:
        centre1 -= tl.load(offset + image // BATCH * C + channels).to(tl.float32)
    w1 = tl.load(weight + image // BATCH * C + channels).to(tl.float32)
    centre, scale, w = centre1[None, :], scale1[None, :], w1[None, :]
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
        _, hat, dz = _chosen(x + at, dy + p * C, inside, centre, scale, w, b, C, W, TAPS)
        dz_hat += dz * hat
        dz_sum += dz
    s_hat, s = tl.sum(dz_hat, 0), tl.sum(dz_sum, 0)
    n = SIZE * H * W
    g_hat1, g1 = _group_sums(s_hat * w1, SIZE, CB) / n, _group_sums(s * w1, SIZE, CB) / n
    hats = (tl.load(totals + image * C + channels) - centre1 * (H * W)) * scale1
    parts += image * (3 * C) + channels
    tl.store(parts, s_hat)
    tl.store(parts + C, s)
    tl.store(parts + 2 * C, (s * w1 - g1 * (H * W) - hats * g_hat1) * scale1)
    g_hat, g = g_hat1[None, :], g1[None, :]
    for first in range(0, count, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        inside = (p < count) & (channels >= 0)[None, :]
        at = _first_tap(p, C, W, TAPS)
        tap, hat, dz = _chosen(x + at, dy + p * C, inside, centre, scale, w, b, C, W, TAPS)
        for t in tl.static_range(TAPS):
            if TAPS > 1:
                hat = _hat(x + at, inside, centre, scale, t, C, W)
            d = (tl.where(tap == t, dz * w, 0.0) - g - hat * g_hat) * scale
            tl.store(dx + at + (t // 2 * W + t % 2) * C, d.to(dx.dtype.element_ty), inside)


def forward(
    x: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    pool: bool,
    channels: int | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [l, b, h, w, c], the others [l, c] to y, as x or half as high and wide, stats [l, b, 2, g], totals [l, b, c]

    A program processes `channels` channels, and computes `tile` output values at a time.
    """
    lanes, batch, h, w, c = x.shape
    y = x.new_empty((lanes, batch, h // 2, w // 2, c) if pool else x.shape)
    stats = torch.empty((lanes, batch, 2, groups), dtype=torch.float32, device=x.device)
    totals = torch.empty((lanes, batch, c), dtype=torch.float32, device=x.device)
    count, blocks, warps = _sizes(x, groups, pool, channels, tile)
    with torch.cuda.device_of(x):
        _forward[(lanes * batch * (c // blocks["CB"]),)](
            *(
                x,
                x if offset is None else offset,
                weight,
                bias,
                y,
                stats,
                totals,
                count,
                eps,
                offset is not None,
            ),
            *(batch, c, h, w),
            **blocks,
            num_warps=warps,
        )
    return y, stats, totals


def backward(
    x: Tensor,
    dy: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    stats: Tensor,
    totals: Tensor,
    groups: int,
    pool: bool,
    channels: int | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight, bias and offset, [l, 3, c]"""
    lanes, batch, h, w, c = x.shape
    dx, parts = torch.empty_like(x), torch.empty((lanes, batch, 3, c), dtype=torch.float32, device=x.device)
    count, blocks, warps = _sizes(x, groups, pool, channels, tile)
    with torch.cuda.device_of(x):
        _backward[(lanes * batch * (c // blocks["CB"]),)](
            *(x, dy, x if offset is None else offset, weight, bias, stats, totals, dx, parts),
            *(count, offset is not None, batch, c, h, w),
            **blocks,
            num_warps=warps,
        )
    return dx, sum_of(parts, 1, torch.float32)


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
