"""The products of `hadamard.py` on a GPU, in Triton: the inner weights stay in registers.

    W[m, n] = W1[m, n] (W2[m, n] + shift),   W_i = A_i Y_i^T
    G1 = dW (W2 + shift),   G2 = dW W1,   dA_i = G_i Y_i,   dY_i = G_i^T A_i

A program of the backward pass has some rows of dA, or some of dY, and goes over dW once. Products in A's
type, float32 sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedpara.engines.batched.kernels.gpu.sums import parts_for, sum_of
from fedpara.engines.batched.kernels.hadamard import RANK

PROGRAMS = 512
"""Enough programs to keep a large GPU busy to the end."""


@triton.jit  # type: ignore[untyped-decorator]
def _rows(
    at: tl.tensor,
    first: tl.tensor,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    BR: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """Rows of a matrix [ROWS, R] from `first`, in this type, with zeros outside."""
    i, r = first + tl.arange(0, B), tl.arange(0, BR)
    inside = (i < ROWS)[:, None] & (r < R)[None, :]
    return tl.load(at + i[:, None] * R + r[None, :], inside, 0.0).to(TYPE)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(
    at: tl.tensor,
    first: tl.tensor,
    values: tl.tensor,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    BR: tl.constexpr,
) -> tl.tensor:
    i, r = first + tl.arange(0, B), tl.arange(0, BR)
    inside = (i < ROWS)[:, None] & (r < R)[None, :]
    tl.store(at + i[:, None] * R + r[None, :], values.to(at.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _compose(
    a: tl.tensor,
    y: tl.tensor,
    w: tl.tensor,
    shift: float,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
) -> None:
    across: tl.constexpr = (N + BN - 1) // BN
    share: tl.constexpr = ((M + BM - 1) // BM + SPLIT - 1) // SPLIT
    TYPE: tl.constexpr = a.dtype.element_ty
    program = tl.program_id(0)
    n, part = program % across * BN, program // across % SPLIT
    lane = (program // (across * SPLIT)).to(tl.int64)
    a, y, w = a + lane * (2 * M * R), y + lane * (2 * N * R), w + lane * (M * N)
    y1, y2 = _rows(y, n, N, R, BN, BR, TYPE), _rows(y + N * R, n, N, R, BN, BR, TYPE)
    j = n + tl.arange(0, BN)
    for step in range(share):
        m = (part * share + step) * BM
        w1 = tl.dot(_rows(a, m, M, R, BM, BR, TYPE), y1.T)
        w2 = tl.dot(_rows(a + M * R, m, M, R, BM, BR, TYPE), y2.T)
        i = m + tl.arange(0, BM)
        inside = (i < M)[:, None] & (j < N)[None, :]
        tl.store(w + i[:, None] * N + j[None, :], (w1 * (w2 + shift)).to(TYPE), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _inner_gradients(
    a1: tl.tensor, a2: tl.tensor, y1: tl.tensor, y2: tl.tensor, dw: tl.tensor, shift: float
) -> tl.tensor:
    """G1 and G2 of a tile of dW, in A's type"""
    dw = dw.to(tl.float32)
    g1 = (dw * (tl.dot(a2, y2.T) + shift)).to(a1.dtype)
    g2 = (dw * tl.dot(a1, y1.T)).to(a1.dtype)
    return g1, g2


@triton.jit  # type: ignore[untyped-decorator]
def _row_gradient(
    a: tl.tensor,
    y: tl.tensor,
    dw: tl.tensor,
    da: tl.tensor,
    shift: float,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
) -> None:
    down: tl.constexpr = (M + BM - 1) // BM
    TYPE: tl.constexpr = a.dtype.element_ty
    program = tl.program_id(0)
    m, lane = program % down * BM, (program // down).to(tl.int64)
    a, y, dw, da = (
        a + lane * (2 * M * R),
        y + lane * (2 * N * R),
        dw + lane * (M * N),
        da + lane * (2 * M * R),
    )
    a1, a2 = _rows(a, m, M, R, BM, BR, TYPE), _rows(a + M * R, m, M, R, BM, BR, TYPE)
    total1, total2 = tl.zeros((BM, BR), tl.float32), tl.zeros((BM, BR), tl.float32)
    for n in range(0, N, BN):
        y1, y2 = _rows(y, n, N, R, BN, BR, TYPE), _rows(y + N * R, n, N, R, BN, BR, TYPE)
        g1, g2 = _inner_gradients(a1, a2, y1, y2, _tile(dw, m, n, M, N, BM, BN), shift)
        total1 = tl.dot(g1, y1, total1)
        total2 = tl.dot(g2, y2, total2)
    _store_rows(da, m, total1, M, R, BM, BR)
    _store_rows(da + M * R, m, total2, M, R, BM, BR)


@triton.jit  # type: ignore[untyped-decorator]
def _column_gradient(
    a: tl.tensor,
    y: tl.tensor,
    dw: tl.tensor,
    dy: tl.tensor,
    shift: float,
    LANES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
) -> None:
    """dy is [SPLIT, lane, 2, n, r]: each part sums its share of the rows of dW."""
    across: tl.constexpr = (N + BN - 1) // BN
    share: tl.constexpr = ((M + BM - 1) // BM + SPLIT - 1) // SPLIT
    TYPE: tl.constexpr = a.dtype.element_ty
    program = tl.program_id(0)
    n, part = program % across * BN, program // across % SPLIT
    lane = (program // (across * SPLIT)).to(tl.int64)
    a, y, dw = a + lane * (2 * M * R), y + lane * (2 * N * R), dw + lane * (M * N)
    dy += (part * LANES + lane) * (2 * N * R)
    y1, y2 = _rows(y, n, N, R, BN, BR, TYPE), _rows(y + N * R, n, N, R, BN, BR, TYPE)
    total1, total2 = tl.zeros((BN, BR), tl.float32), tl.zeros((BN, BR), tl.float32)
    for step in range(share):
        m = (part * share + step) * BM
        a1, a2 = _rows(a, m, M, R, BM, BR, TYPE), _rows(a + M * R, m, M, R, BM, BR, TYPE)
        g1, g2 = _inner_gradients(a1, a2, y1, y2, _tile(dw, m, n, M, N, BM, BN), shift)
        total1 = tl.dot(g1.T, a1, total1)
        total2 = tl.dot(g2.T, a2, total2)
    _store_rows(dy, n, total1, N, R, BN, BR)
    _store_rows(dy + N * R, n, total2, N, R, BN, BR)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(
    at: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:
    i, j = m + tl.arange(0, BM), n + tl.arange(0, BN)
    return tl.load(at + i[:, None] * N + j[None, :], (i < M)[:, None] & (j < N)[None, :], 0.0)


def forward(a: Tensor, y: Tensor, shift: float, bm: int = 128, bn: int = 64, warps: int = 8) -> Tensor:
    """a [l, 2, m, r], y [l, 2, n, r] to w [l, m, n], in their type"""
    lanes, _, m, r = a.shape
    n = y.shape[2]
    w = a.new_empty((lanes, m, n))
    bn, br = _block(n, bn), _block(r, RANK)
    tiles = lanes * triton.cdiv(n, bn)
    split = _split(tiles, triton.cdiv(m, bm))
    stages = _stages(2 * bn * br + bm * bn, 2 * bm * br, a)
    with torch.cuda.device_of(a):
        _compose[(tiles * split,)](
            a, y, w, shift, m, n, r, split, bm, bn, br, num_warps=warps, num_stages=stages
        )
    return w


def backward(a: Tensor, y: Tensor, dw: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """dA and dY, in the type of a and y"""
    return row_gradient(a, y, dw, shift), column_gradient(a, y, dw, shift)


def row_gradient(
    a: Tensor, y: Tensor, dw: Tensor, shift: float, bm: int = 64, bn: int = 64, warps: int = 4
) -> Tensor:
    lanes, _, m, r = a.shape
    n = y.shape[2]
    da, br, bn = torch.empty_like(a), _block(r, RANK), _block(n, bn)
    stages = _stages(2 * bm * br + 2 * bm * bn, 2 * bn * br + bm * bn, a)
    with torch.cuda.device_of(a):
        _row_gradient[(lanes * triton.cdiv(m, bm),)](
            a, y, dw, da, shift, m, n, r, bm, bn, br, num_warps=warps, num_stages=stages
        )
    return da


def column_gradient(
    a: Tensor, y: Tensor, dw: Tensor, shift: float, bm: int = 64, bn: int = 64, warps: int = 4
) -> Tensor:
    lanes, _, m, r = a.shape
    n = y.shape[2]
    br, bn = _block(r, RANK), _block(n, bn)
    tiles = lanes * triton.cdiv(n, bn)
    split = _split(tiles, triton.cdiv(m, bm))
    parts = parts_for(split, y.shape, y)
    stages = _stages(2 * bn * br + 2 * bm * bn, 2 * bm * br + bm * bn, a)
    with torch.cuda.device_of(a):
        _column_gradient[(tiles * split,)](
            a, y, dw, parts, shift, lanes, m, n, r, split, bm, bn, br, num_warps=warps, num_stages=stages
        )
    return sum_of(parts, 0, y.dtype)


def _split(tiles: int, rows: int) -> int:
    """The number of parts into which the rows are split. If there are several, each has at least four blocks."""
    return max(1, min(PROGRAMS // tiles, rows // 4))


def _stages(kept: int, loaded: int, like: Tensor) -> int:
    """The number of loop steps to prefetch: 3, or as many as fit in shared memory.

    `kept` and `loaded` count the values, in the type of `like`, that a program keeps, and that it loads per step.
    """
    if like.device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(like.device)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return max(1, min(3, (shared // like.element_size() - kept) // loaded))


def _block(size: int, most: int) -> int:
    """The next power of two, at least 16 (the smallest size of a product) and at most `most`."""
    return int(min(most, max(16, 1 << (size - 1).bit_length())))
