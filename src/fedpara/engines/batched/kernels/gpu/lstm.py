"""The recurrence of `lstm.py` on a GPU: one Triton kernel per text and direction, 16-bit products, float32 sums.

Several programs share a lane. Each has a few units of h and their part of W, which it keeps from the first character to
the last: loading W again at every character would dominate. For each character a program does

    wait until all of the lane have written h_{t-1} (backwards da_{t+1});  read it;  multiply;  cell;  write own h_t

All programs of a lane must run at once, so a launch has no more of them than the GPU has multiprocessors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""Rows of a batch per program: larger batches use more programs, smaller ones are padded."""
UNITS = 32
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _tanh(x: tl.tensor) -> tl.tensor:
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _read(at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _wait(arrived: tl.tensor, count: int) -> None:
    while tl.atomic_add(arrived, 0, sem="acquire") < count:
        pass


@triton.jit  # type: ignore[untyped-decorator]
def _arrive(arrived: tl.tensor) -> None:
    tl.debug_barrier()  # all threads of this program have written
    tl.atomic_add(arrived, 1, sem="release")


@triton.jit  # type: ignore[untyped-decorator]
def _own(
    first: int, BATCH: int, programs: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(the group that this program waits for, its lane, its rows of the batch, its units of h)"""
    group = first + tl.program_id(0) // programs
    tiles = tl.cdiv(BATCH, ROWS)
    b = group % tiles * ROWS + tl.arange(0, ROWS)
    u = tl.program_id(0) % programs * UNITS + tl.arange(0, UNITS)
    return group, (group // tiles).to(tl.int64), b, u


@triton.jit  # type: ignore[untyped-decorator]
def _weights(at: tl.tensor, H: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    return tl.load(at), tl.load(at + H * H), tl.load(at + 2 * H * H), tl.load(at + 3 * H * H)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
    p: tl.tensor,
    w: tl.tensor,
    h: tl.tensor,
    c: tl.tensor,
    gates: tl.tensor,
    arrived: tl.tensor,
    first: int,
    T: int,
    LANES: int,
    BATCH: int,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    programs: tl.constexpr = H // UNITS
    group, lane, b, u = _own(first, BATCH, programs, ROWS, UNITS)
    k = tl.arange(0, H)
    inside = (b < BATCH)[:, None]
    turned = w + lane * (4 * H * H) + u[None, :] * H + k[:, None]
    w_i, w_f, w_g, w_o = _weights(turned, H)
    c_t = tl.zeros((ROWS, UNITS), tl.float32)
    for t in range(T):
        row = lane * BATCH + b + t * (LANES * BATCH)
        at = row[:, None] * (4 * H) + u[None, :]
        state = row[:, None] * H + u[None, :]
        i, f = _read(p + at, inside), _read(p + at + H, inside)
        g, o = _read(p + at + 2 * H, inside), _read(p + at + 3 * H, inside)
        _wait(arrived + group, t * programs)
        before = row - LANES * BATCH
        known = inside & (before >= 0)[:, None]
        h_before = tl.load(h + before[:, None] * H + k[None, :], mask=known, other=0.0)
        i, f = tl.sigmoid(tl.dot(h_before, w_i, i)), tl.sigmoid(tl.dot(h_before, w_f, f))
        g, o = _tanh(tl.dot(h_before, w_g, g)), tl.sigmoid(tl.dot(h_before, w_o, o))
        c_t = f * c_t + i * g
        tl.store(h + state, (o * _tanh(c_t)).to(h.dtype.element_ty), mask=inside)
        _arrive(arrived + group)
        tl.store(c + state, c_t, mask=inside)
        tl.store(gates + at, i, mask=inside)
        tl.store(gates + at + H, f, mask=inside)
        tl.store(gates + at + 2 * H, g, mask=inside)
        tl.store(gates + at + 3 * H, o, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(
    dh: tl.tensor,
    c: tl.tensor,
    gates: tl.tensor,
    w: tl.tensor,
    da: tl.tensor,
    arrived: tl.tensor,
    first: int,
    T: int,
    LANES: int,
    BATCH: int,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    programs: tl.constexpr = H // UNITS
    kind = da.dtype.element_ty
    group, lane, b, u = _own(first, BATCH, programs, ROWS, UNITS)
    k = tl.arange(0, H)
    inside = (b < BATCH)[:, None]
    columns = w + lane * (4 * H * H) + k[:, None] * H + u[None, :]
    w_i, w_f, w_g, w_o = _weights(columns, H)
    dc = tl.zeros((ROWS, UNITS), tl.float32)
    for s in range(T):
        row = lane * BATCH + b + (T - 1 - s) * (LANES * BATCH)
        at = row[:, None] * (4 * H) + u[None, :]
        state = row[:, None] * H + u[None, :]
        i, f = _read(gates + at, inside), _read(gates + at + H, inside)
        g, o = _read(gates + at + 2 * H, inside), _read(gates + at + 3 * H, inside)
        bent = _tanh(_read(c + state, inside))
        before = row - LANES * BATCH
        c_before = _read(c + before[:, None] * H + u[None, :], inside & (before >= 0)[:, None])
        d = _read(dh + state, inside)
        _wait(arrived + group, s * programs)
        after = da + (row + LANES * BATCH)[:, None] * (4 * H) + k[None, :]
        known = inside & (s > 0)
        d = tl.dot(tl.load(after, mask=known, other=0.0), w_i, d)
        d = tl.dot(tl.load(after + H, mask=known, other=0.0), w_f, d)
        d = tl.dot(tl.load(after + 2 * H, mask=known, other=0.0), w_g, d)
        d = tl.dot(tl.load(after + 3 * H, mask=known, other=0.0), w_o, d)
        dc += d * o * (1 - bent * bent)
        tl.store(da + at, (dc * g * i * (1 - i)).to(kind), mask=inside)
        tl.store(da + at + H, (dc * c_before * f * (1 - f)).to(kind), mask=inside)
        tl.store(da + at + 2 * H, (dc * i * (1 - g * g)).to(kind), mask=inside)
        tl.store(da + at + 3 * H, (d * bent * o * (1 - o)).to(kind), mask=inside)
        _arrive(arrived + group)
        dc *= f


def forward(p: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p [T, l, B, 4H], w [l, 4H, H] to h [T, l, B, H] in the type of p, and c and the gates in float32"""
    p = p.contiguous()
    h = p.new_empty(*p.shape[:3], w.shape[2])
    c, gates = torch.empty_like(h, dtype=torch.float32), torch.empty_like(p, dtype=torch.float32)
    _launch(_forward, h.shape, p, w.contiguous(), h, c, gates)
    return h, c, gates


def backward(dh: Tensor, c: Tensor, gates: Tensor, w: Tensor) -> Tensor:
    """da [T, l, B, 4H], in the type of dh"""
    da = torch.empty_like(gates, dtype=dh.dtype)
    _launch(_backward, dh.shape, dh.contiguous(), c, gates, w.contiguous(), da)
    return da


def _launch(kernel: triton.JITFunction, shape: torch.Size, *tensors: Tensor) -> None:
    """Launches as many groups of programs at a time as can run at once: programs of a group wait for each other."""
    length, lanes, batch, hidden = shape
    device = tensors[0].device
    groups, programs = lanes * triton.cdiv(batch, ROWS), hidden // UNITS
    arrived = torch.zeros(groups, dtype=torch.int32, device=device)
    at_once = torch.cuda.get_device_properties(device).multi_processor_count // programs
    with torch.cuda.device_of(tensors[0]):
        for first in range(0, groups, at_once):
            grid = (min(at_once, groups - first) * programs,)
            kernel[grid](
                *tensors, arrived, first, length, lanes, batch, hidden, ROWS, UNITS,
                num_stages=1, num_warps=WARPS, launch_cooperative_grid=True,
            )  # fmt: skip
