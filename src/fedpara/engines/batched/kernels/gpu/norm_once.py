"""The fused norms of `norm_ops.py` on a GPU, in Triton, for images that fit in a program's registers.

    z = hat weight + bias,   hat = (x - centre) / sqrt(variance + eps),   centre = mean - offset, per channel
    y = max(z, 0), or its maximum over the four taps of a square of 2 x 2 pixels
    dx = dz A + x B + D,   dz = dy where it is the maximum and above 0

A program processes one image and a block of whole groups of channels, and reads each number once, in 16 bits. The
image is a tuple of PARTS tensors per tap, so that few numbers are in float32 at a time: `_after` makes the compiler
convert a part again after each sum, in place of keeping it in float32. Sums over a group are butterflies of
`tl.gather`: with a reshape, the compiler computes all of an image in the layout of the group sums, in which all
threads of a warp repeat each other's work. Larger images and other numbers of pixels use `gpu/norm_streamed.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedpara.engines.batched.kernels.gpu.sums import sum_of

VALUES = 64
"""Values of an image per thread: 32 registers, and as many for dz in the backward pass."""
PART = 8
"""Values of a part per thread: it reads 16 bytes."""
LARGEST = 1 << 15
"""Values per program, with 16 warps."""
SMALLEST = 1 << 10
"""Values per program, if the image has so many channels."""
REGISTERS = 128
"""The most per thread in the backward pass: with more, too few programs run at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _group_sums(values: tl.tensor, BITS: tl.constexpr, CB: tl.constexpr) -> tl.tensor:
    """For each of CB channels the sum of its group of 2^BITS."""
    for bit in tl.static_range(BITS):
        values += tl.gather(values, tl.arange(0, CB) ^ (1 << bit), 0)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _place(p: tl.tensor, t: tl.constexpr, C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr) -> tl.tensor:
    """Where in the image tap t of the result's pixel p is."""
    if TAPS == 1:
        return p * C
    half: tl.constexpr = W // 2
    return (p // half * W + p % half) * (2 * C) + (t // 2 * W + t % 2) * C


@triton.jit  # type: ignore[untyped-decorator]
def _after(v: tl.tensor, zero: int, known: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """v, but not before `known` is known: v ^ (zero & known)"""
    if PTX:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $4, 0x78;",
            "=r,r,r,r,r,r",
            [v, zero, known.to(tl.int32, bitcast=True)],
            dtype=v.dtype,
            is_pure=True,
            pack=2,
        )
    return v


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
    x: tl.tensor,
    offset: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    stats: tl.tensor,
    totals: tl.tensor,
    zero: int,
    eps: float,
    OFFSET: tl.constexpr,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """stats is [image, 2, group]: means and 1 / deviations; totals [image, channel]."""
    SIZE: tl.constexpr = 1 << BITS
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    channels = start + tl.arange(0, CB)
    of_lane = image // BATCH * C + channels
    x += image * (C * H * W) + channels[None, :]
    y += image * (C * H * W // TAPS) + channels[None, :]
    n = SIZE * H * W
    parts = ()
    for i in tl.static_range(PARTS):
        p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
        for t in tl.static_range(TAPS):
            parts += (tl.load(x + _place(p, t, C, W, TAPS)),)  # type: ignore[assignment]
    total = tl.zeros((PIXELS, CB), tl.float32)
    for i in tl.static_range(PARTS * TAPS):
        total += parts[i].to(tl.float32)
    of_channel = tl.sum(total, 0)
    tl.store(totals + image * C + channels, of_channel)
    moved = tl.zeros((CB,), tl.float32)
    if OFFSET:
        moved = tl.load(offset + of_lane).to(tl.float32)
    means = _group_sums(of_channel + moved * (H * W), BITS, CB) / n
    centre = (means - moved)[None, :]
    total = tl.zeros((PIXELS, CB), tl.float32)
    for i in tl.static_range(PARTS * TAPS):
        c = _after(parts[i], zero, centre, PTX).to(tl.float32) - centre
        total += c * c
    scales = tl.rsqrt(_group_sums(tl.sum(total, 0), BITS, CB) / n + eps)
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    tl.store(group, means, channels % SIZE == 0)
    tl.store(group + C // SIZE, scales, channels % SIZE == 0)
    w = (tl.load(weight + of_lane).to(tl.float32) * scales)[None, :]
    b = tl.load(bias + of_lane).to(tl.float32)[None, :]
    for i in tl.static_range(PARTS):
        top = tl.zeros((PIXELS, CB), tl.float32)
        for t in tl.static_range(TAPS):
            c = _after(parts[i * TAPS + t], zero, w, PTX).to(tl.float32) - centre
            top = tl.maximum(top, c * w + b)
        p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
        tl.store(y + p * C, top.to(y.dtype.element_ty))


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
    parts_of_sums: tl.tensor,
    zero: int,
    OFFSET: tl.constexpr,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    PTX: tl.constexpr,
    AGAIN: tl.constexpr,
) -> None:
    """The image's share of the gradients of weight, bias and offset is [image, 3, channel].

    AGAIN reads x a second time, while the cache has it, in place of keeping it.
    """
    SIZE: tl.constexpr = 1 << BITS
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    channels = start + tl.arange(0, CB)
    of_lane = image // BATCH * C + channels
    x += image * (C * H * W) + channels[None, :]
    dx += image * (C * H * W) + channels[None, :]
    dy += image * (C * H * W // TAPS) + channels[None, :]
    parts, dys = (), ()
    if not AGAIN:
        for i in tl.static_range(PARTS):
            p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
            dys += (tl.load(dy + p * C),)  # type: ignore[assignment]
            for t in tl.static_range(TAPS):
                parts += (tl.load(x + _place(p, t, C, W, TAPS)),)  # type: ignore[assignment]
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    centres, scales = tl.load(group), tl.load(group + C // SIZE)
    if OFFSET:
        centres -= tl.load(offset + of_lane).to(tl.float32)
    weights = tl.load(weight + of_lane).to(tl.float32)
    centre, w = centres[None, :], (weights * scales)[None, :]
    b = tl.load(bias + of_lane).to(tl.float32)[None, :]
    dz_c = tl.zeros((PIXELS, CB), tl.float32)
    dz_sum = tl.zeros((PIXELS, CB), tl.float32)
    dzs, taps = (), ()
    for i in tl.static_range(PARTS):
        p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
        if AGAIN:
            d = tl.load(dy + p * C)
            v = tl.load(x + _place(p, 0, C, W, TAPS))
        else:
            d = dys[i]
            v = parts[i * TAPS]
        c = v.to(tl.float32) - centre
        z = c * w + b
        if TAPS > 1:  # of maxima that are equal after rounding, the first gets the gradient, as in torch
            z = z.to(x.dtype.element_ty).to(tl.float32)
            tap = tl.zeros((PIXELS, CB), tl.int8)
            for t in tl.static_range(1, TAPS):
                if AGAIN:  # noqa: SIM108 - decided at compile time
                    v = tl.load(x + _place(p, t, C, W, TAPS))
                else:
                    v = parts[i * TAPS + t]
                one = v.to(tl.float32) - centre
                z1 = (one * w + b).to(x.dtype.element_ty).to(tl.float32)
                higher = z1 > z
                c = tl.where(higher, one, c)
                z = tl.where(higher, z1, z)
                tap = tl.where(higher, t, tap).to(tl.int8)
            taps += (tap,)  # type: ignore[assignment]
        dz = tl.where(z > 0.0, d.to(tl.float32), 0.0)
        dz_c += dz * c
        dz_sum += dz
        dzs += (dz.to(dy.dtype.element_ty),)  # type: ignore[assignment]
    s_hat, s = tl.sum(dz_c, 0) * scales, tl.sum(dz_sum, 0)
    n = SIZE * H * W
    g_hat, g = _group_sums(s_hat * weights, BITS, CB) / n, _group_sums(s * weights, BITS, CB) / n
    hats = (tl.load(totals + image * C + channels) - centres * (H * W)) * scales
    parts_of_sums += image * (3 * C) + channels
    tl.store(parts_of_sums, s_hat)
    tl.store(parts_of_sums + C, s)
    tl.store(parts_of_sums + 2 * C, (s * weights - g * (H * W) - hats * g_hat) * scales)
    slopes = -(scales * scales * g_hat)
    slope, level = slopes[None, :], (-(scales * g) - slopes * centres)[None, :]
    for i in tl.static_range(PARTS):
        dz = _after(dzs[i], zero, level, PTX).to(tl.float32) * w + level
        p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
        for t in tl.static_range(TAPS):
            at = _place(p, t, C, W, TAPS)
            if AGAIN:  # noqa: SIM108
                v = tl.load(x + at)
            else:
                v = _after(parts[i * TAPS + t], zero, level, PTX)
            d = dz
            if TAPS > 1:
                d = tl.where(taps[i] == t, dz, level)
            tl.store(dx + at, (v.to(tl.float32) * slope + d).to(dx.dtype.element_ty))


def fits(x: Tensor, groups: int, pool: bool) -> bool:
    """x [l, b, h, w, c] has 2^k pixels, and few enough."""
    h, w, c = x.shape[2:]
    pixels = h * w
    return pixels & (pixels - 1) == 0 and block(c, pixels, c // groups, not pool) * pixels <= LARGEST


def block(c: int, pixels: int, size: int, wide: bool) -> int:
    """The number of channels per program, in whole groups: at least 16 or, if `wide` or few pixels, 32."""
    least, channels = 32 if wide or pixels <= 256 else 16, max(size, 16)
    while (channels < least or channels * pixels < SMALLEST) and c % (2 * channels) == 0:
        channels *= 2
    return channels


def _sizes(x: Tensor, groups: int, pool: bool, channels: int, registers: int | None) -> dict[str, int | None]:
    """The sizes of a program's blocks, and how it is compiled."""
    h, w, c = x.shape[2:]
    pixels, taps = h * w, 4 if pool else 1
    warps = max(1, channels * pixels // (32 * VALUES))
    each = channels * pixels // (32 * warps)
    parts = min(pixels // taps, max(1, each // (PART * taps)))
    blocks: dict[str, int | None] = {
        "BITS": (c // groups).bit_length() - 1,
        "CB": channels,
        "PIXELS": pixels // taps // parts,
        "PARTS": parts,
        "TAPS": taps,
        "PTX": x.is_cuda,
        "num_warps": warps,
    }
    return blocks | ({"maxnreg": registers} if registers and x.is_cuda else {})


def forward(
    x: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    pool: bool,
    channels: int | None = None,
    registers: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As in `gpu/norm_streamed.py`. A program processes `channels` channels, with at most `registers` per thread."""
    lanes, batch, h, w, c = x.shape
    y = x.new_empty((lanes, batch, h // 2, w // 2, c) if pool else x.shape)
    stats = torch.empty((lanes, batch, 2, groups), dtype=torch.float32, device=x.device)
    totals = torch.empty((lanes, batch, c), dtype=torch.float32, device=x.device)
    channels = channels or block(c, h * w, c // groups, False)
    with torch.cuda.device_of(x):
        _forward[(lanes * batch * (c // channels),)](
            *(x, x if offset is None else offset, weight, bias, y, stats, totals, 0, eps, offset is not None),
            *(batch, c, h, w),
            **_sizes(x, groups, pool, channels, registers),
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
    registers: int | None = REGISTERS,
    again: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight, bias and offset, [l, 3, c]"""
    lanes, batch, h, w, c = x.shape
    dx, parts = torch.empty_like(x), torch.empty((lanes, batch, 3, c), dtype=torch.float32, device=x.device)
    channels = channels or block(c, h * w, c // groups, not pool)
    again = not pool and h * w >= 256 if again is None else again
    with torch.cuda.device_of(x):
        _backward[(lanes * batch * (c // channels),)](
            *(x, dy, x if offset is None else offset, weight, bias, stats, totals, dx, parts, 0),
            *(offset is not None, batch, c, h, w),
            **_sizes(x, groups, pool, channels, registers),
            AGAIN=again,
        )
    return dx, sum_of(parts, 1, torch.float32)
