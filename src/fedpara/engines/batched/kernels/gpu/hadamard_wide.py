"""The products of `hadamard.py` on a GPU for ranks whose sums do not fit in a program's registers, in Triton.

    W = W1 (W2 + shift),   W_i = A_i Y_i^T          one program per tile of W, in steps of BK ranks
    G1 = dW (W2 + shift),  G2 = dW W1               the same program; G is written to memory
    dA_i = G_i Y_i,        dY_i = G_i^T A_i         torch's products

Products in A's type, float32 sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STAGES = 3
"""The number of steps of the loop over ranks that are prefetched."""


@triton.jit  # type: ignore[untyped-decorator]
def _part(
    at: tl.tensor,
    first: tl.tensor,
    r: tl.tensor,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """BK columns from `r` of a matrix's rows from `first`, with zeros outside."""
    i, k = first + tl.arange(0, B), r + tl.arange(0, BK)
    inside = (i < ROWS)[:, None] & (k < R)[None, :]
    return tl.load(at + i[:, None] * R + k[None, :], inside, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(
    a: tl.tensor,
    y: tl.tensor,
    dw: tl.tensor,
    out: tl.tensor,
    shift: float,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    GRADIENT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """out is W [lane, m, n], or G [lane, 2, m, n]."""
    down: tl.constexpr = (M + BM - 1) // BM
    across: tl.constexpr = (N + BN - 1) // BN
    program = tl.program_id(0)
    lane = (program // (down * across)).to(tl.int64)
    m, n = program // across % down * BM, program % across * BN
    a, y = a + lane * (2 * M * R), y + lane * (2 * N * R)
    w1, w2 = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for r in range(0, R, BK):
        w1 = tl.dot(_part(a, m, r, M, R, BM, BK), _part(y, n, r, N, R, BN, BK).T, w1)
        w2 = tl.dot(_part(a + M * R, m, r, M, R, BM, BK), _part(y + N * R, n, r, N, R, BN, BK).T, w2)
    i, j = m + tl.arange(0, BM), n + tl.arange(0, BN)
    inside, at = (i < M)[:, None] & (j < N)[None, :], i[:, None] * N + j[None, :]
    if GRADIENT:
        g = tl.load(dw + lane * (M * N) + at, inside, 0.0).to(tl.float32)
        out += lane * (2 * M * N)
        tl.store(out + at, (g * (w2 + shift)).to(out.dtype.element_ty), inside)
        tl.store(out + M * N + at, (g * w1).to(out.dtype.element_ty), inside)
    else:
        tl.store(out + lane * (M * N) + at, (w1 * (w2 + shift)).to(out.dtype.element_ty), inside)


def forward(
    a: Tensor, y: Tensor, shift: float, bm: int = 128, bn: int = 128, bk: int = 32, warps: int = 8
) -> Tensor:
    """a [l, 2, m, r], y [l, 2, n, r] to w [l, m, n], in their type"""
    w = a.new_empty((len(a), a.shape[2], y.shape[2]))
    return _launch(a, y, None, w, shift, bm, bn, bk, warps)


def backward(a: Tensor, y: Tensor, dw: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """dA and dY, in the type of a and y"""
    g = inner_gradients(a, y, dw, shift)
    return g @ y, g.mT @ a


def inner_gradients(
    a: Tensor, y: Tensor, dw: Tensor, shift: float, bm: int = 128, bn: int = 128, bk: int = 32, warps: int = 8
) -> Tensor:
    """G1 and G2 as [l, 2, m, n]"""
    g = a.new_empty((len(a), 2, a.shape[2], y.shape[2]))
    return _launch(a, y, dw, g, shift, bm, bn, bk, warps)


def _launch(
    a: Tensor, y: Tensor, dw: Tensor | None, out: Tensor, shift: float, bm: int, bn: int, bk: int, warps: int
) -> Tensor:
    lanes, _, m, r = a.shape
    n = y.shape[2]
    tiles = lanes * triton.cdiv(m, bm) * triton.cdiv(n, bn)
    with torch.cuda.device_of(a):
        _tiles[(tiles,)](
            a, y, dw, out, shift, m, n, r, dw is not None, bm, bn, bk, num_warps=warps, num_stages=STAGES
        )
    return out
