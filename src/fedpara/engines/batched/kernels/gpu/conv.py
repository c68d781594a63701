"""The convolutions of `conv.py` on a GPU: implicit GEMMs in Triton, 16-bit products and float32 sums.

    forward and dx    y[m, n] = sum over (t, r) of  x[m + t, r] w[t, r, n]      m: image and pixel; dx uses w transposed
    dw                dw[o, (t, c)] = sum over m of  dy[m, o] x[m + t, c]       split over m where tiles are few

The pixels of a product are a box [images, high, wide], loaded at once and shifted by the tap t: the copy engine fills
in zeros outside the image. A tap that moves the whole box outside is skipped, so on small images a box is one pixel
of many images: on 2x2 that saves 5 of 9 taps, on 4x4 nearly a third.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fedpara.engines.batched.kernels.gpu.sums import parts_for, sum_of

SMALL = 16
"""Images of up to this many pixels use boxes of one pixel of many images."""
PROGRAMS = 512
"""Enough tiles to keep a large GPU busy to the end."""


@dataclass(frozen=True)
class Tile:
    """One program's work: a box of pixels by `n` channels, `k` channels deep; for `dw` a tile of k by n.

    Powers of two, and the channels must be multiples of n and k.
    """

    images: int
    high: int
    wide: int
    n: int
    k: int = 64
    warps: int = 8
    stages: int = 4
    split: int = 1


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(
    x: tl.tensor_descriptor,
    w: tl.tensor_descriptor,
    bias: tl.tensor,
    y: tl.tensor_descriptor,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TURNED: tl.constexpr,
    BIAS: tl.constexpr,
    IMAGES: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """w is [lane * o, t * c] either way: r = c and n = o, or TURNED r = o, n = c and t its opposite.

    The product is y^T = w x^T, because only the right factor can be a box in shared memory.
    """
    columns: tl.constexpr = N // BN
    across: tl.constexpr = (W + WIDE - 1) // WIDE
    down: tl.constexpr = (H + HIGH - 1) // HIGH
    along: tl.constexpr = (BATCH + IMAGES - 1) // IMAGES
    deep: tl.constexpr = R // BK
    M: tl.constexpr = IMAGES * HIGH * WIDE
    program = tl.program_id(0)
    n = program % columns * BN
    box = program // columns
    j = box % across * WIDE
    i = box // across % down * HIGH
    b = box // (across * down) % along * IMAGES
    lane = box // (across * down * along)

    top, bottom = tl.maximum(-(KH // 2), -(i + HIGH - 1)), tl.minimum(KH // 2, H - 1 - i)
    left, right = tl.maximum(-(KW // 2), -(j + WIDE - 1)), tl.minimum(KW // 2, W - 1 - j)
    taps = right - left + 1
    total = tl.zeros((BN, M), tl.float32)
    for step in range((bottom - top + 1) * taps * deep):
        tap = step // deep
        r = step % deep * BK
        di, dj = top + tap // taps, left + tap % taps
        t = (di + KH // 2) * KW + dj + KW // 2
        if TURNED:  # noqa: SIM108 - decided at compile time
            a = w.load([lane * R + r, (KH * KW - 1 - t) * N + n]).T
        else:
            a = w.load([lane * N + n, t * R + r])
        pixels = x.load([lane, b, i + di, j + dj, r]).reshape(M, BK)
        total = tl.dot(a, pixels.T, total)
    if BIAS:
        total += tl.load(bias + lane * N + n + tl.arange(0, BN)).to(tl.float32)[:, None]
    y.store([lane, b, i, j, n], total.to(y.dtype).T.reshape(1, IMAGES, HIGH, WIDE, BN))


@triton.jit  # type: ignore[untyped-decorator]
def _correlate(
    x: tl.tensor_descriptor,
    dy: tl.tensor_descriptor,
    dw: tl.tensor,
    LANES: tl.constexpr,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SPLIT: tl.constexpr,
    IMAGES: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    """dw is [SPLIT, lane, o, t, c]: each part sums its share of the boxes that the tap keeps inside.

    The left factor cannot be a box: dy is [lane, b * h * w, o] if a box is whole rows or images, and [lane, b, h * w
    * o] if it is one pixel of many images.
    """
    M: tl.constexpr = IMAGES * HIGH * WIDE
    across: tl.constexpr = O // BM
    columns: tl.constexpr = KH * KW * C // BN
    along: tl.constexpr = (BATCH + IMAGES - 1) // IMAGES
    program = tl.program_id(0)
    o = program % across * BM
    column = program // across % columns * BN
    part = program // (across * columns) % SPLIT
    lane = program // (across * columns * SPLIT)
    t, c = column // C, column % C
    di, dj = t // KW - KH // 2, t % KW - KW // 2

    top, bottom = tl.maximum(0, -di) // HIGH, (H - 1 - tl.maximum(0, di)) // HIGH
    left, right = tl.maximum(0, -dj) // WIDE, (W - 1 - tl.maximum(0, dj)) // WIDE
    tall, broad = bottom - top + 1, right - left + 1
    steps = tl.where((tl.abs(di) < H) & (tl.abs(dj) < W), along * tall * broad, 0)
    share = (steps + SPLIT - 1) // SPLIT
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(part * share, tl.minimum((part + 1) * share, steps)):
        b = step // (tall * broad) * IMAGES
        box = step % (tall * broad)
        i, j = (top + box // broad) * HIGH, (left + box % broad) * WIDE
        if HIGH * WIDE > 1:  # noqa: SIM108
            rows = dy.load([lane, (b * H + i) * W, o])
        else:
            rows = dy.load([lane, b, (i * W + j) * O + o])
        pixels = x.load([lane, b, i + di, j + dj, c]).reshape(M, BN)
        total = tl.dot(rows.reshape(M, BM).T, pixels, total)
    at = dw + (part * LANES + lane).to(tl.int64) * (O * KH * KW * C)
    at += (o + tl.arange(0, BM))[:, None] * (KH * KW * C) + column + tl.arange(0, BN)[None, :]
    tl.store(at, total.to(dw.dtype.element_ty))


def forward(x: Tensor, w: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """x [l, b, h, w, c], w [l, o, i, j, c], bias [l, o] to [l, b, h, w, o]"""
    return _convolved(x, w, bias, w.shape[1], tile)


def input_gradient(dy: Tensor, w: Tensor, tile: Tile | None = None) -> Tensor:
    """dy [l, b, h, w, o], w [l, o, i, j, c] to [l, b, h, w, c]"""
    return _convolved(dy, w, None, w.shape[4], tile, turned=True)


def weight_gradient(x: Tensor, dy: Tensor, kernel: Sequence[int], tile: Tile | None = None) -> Tensor:
    """x [l, b, h, w, c], dy [l, b, h, w, o] to [l, o, i, j, c]"""
    x, dy = x.contiguous(), dy.contiguous()
    lanes, batch, h, w, c = x.shape
    o, high, wide = dy.shape[4], *kernel
    tile = tile or _weight_tile(lanes, batch, h, w, c, o, high * wide)
    dw = parts_for(tile.split, (lanes, o, high, wide, c), x)
    rows = dy.view(lanes, -1, o) if tile.high * tile.wide > 1 else dy.view(lanes, batch, -1)
    programs = lanes * tile.split * (o // tile.k) * (high * wide * c // tile.n)
    with torch.cuda.device_of(x):
        _correlate[(programs,)](
            TensorDescriptor.from_tensor(x, [1, tile.images, tile.high, tile.wide, tile.n]),
            TensorDescriptor.from_tensor(rows, [1, tile.images * tile.high * tile.wide, tile.k]),
            dw, lanes, batch, h, w, c, o, high, wide, tile.split, tile.images, tile.high, tile.wide, tile.k, tile.n,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return sum_of(dw, 0, x.dtype)


def _convolved(
    x: Tensor, kernel: Tensor, bias: Tensor | None, n: int, tile: Tile | None, turned: bool = False
) -> Tensor:
    x, kernel = x.contiguous(), kernel.contiguous()
    lanes, batch, h, w, r = x.shape
    tile = tile or _tile(batch, h, w, n)
    y = torch.empty((lanes, batch, h, w, n), dtype=x.dtype, device=x.device)
    box = [1, tile.images, tile.high, tile.wide]
    boxes = triton.cdiv(batch, tile.images) * triton.cdiv(h, tile.high) * triton.cdiv(w, tile.wide)
    with torch.cuda.device_of(x):
        _convolve[(lanes * boxes * (n // tile.n),)](
            TensorDescriptor.from_tensor(x, [*box, tile.k]),
            TensorDescriptor.from_tensor(
                kernel.view(lanes * kernel.shape[1], -1), [tile.k, tile.n] if turned else [tile.n, tile.k]
            ),
            x if bias is None else bias.contiguous(),
            TensorDescriptor.from_tensor(y, [*box, tile.n]),
            batch, h, w, r, n, kernel.shape[2], kernel.shape[3], turned, bias is not None,
            tile.images, tile.high, tile.wide, tile.n, tile.k, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y


def _tile(batch: int, h: int, w: int, n: int) -> Tile:
    """Single pixels for small images, neighbourhoods of 128 pixels for larger ones."""
    if h * w <= SMALL:
        return Tile(_images(batch), 1, 1, 128 if n % 128 == 0 else 64, warps=4)
    wide = min(_power(w), 128)
    high = min(_power(h), 128 // wide)
    n = next(size for size in (256, 128, 64) if n % size == 0)
    return Tile(128 // (wide * high), high, wide, n, warps=4 if n == 64 else 8, stages=3 if n == 256 else 4)


def _weight_tile(lanes: int, batch: int, h: int, w: int, c: int, o: int, taps: int) -> Tile:
    """64 pixels deep, and split until there are several tiles per multiprocessor."""
    images, high, wide = _images(batch), 1, 1
    if h * w > SMALL and h == _power(h) and w == _power(w) and w <= 64:
        wide, high = w, min(h, 64 // w)
        images = 64 // (wide * high)
    m, n = 128 if o % 128 == 0 else 64, 128 if c % 128 == 0 else 64
    tiles = lanes * (o // m) * (taps * c // n)
    deep = triton.cdiv(batch, images) * (h // high) * (w // wide)
    split = max(1, min(_power(triton.cdiv(PROGRAMS, tiles)), deep // 16))
    return Tile(images, high, wide, n, m, warps=4 if m * n < 128 * 128 else 8, split=split)


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def _images(batch: int) -> int:
    """Images in a box of one pixel: at least what tensor cores need, at most what there are."""
    return max(16, min(64, _power(batch)))
