"""The recurrence of an LSTM layer over stacked clients, each with its own weight, as one op.

    a_t = p_t + h_{t-1} W^T,   i, f, g, o the quarters of a_t
    c_t = sigma(f) c_{t-1} + sigma(i) tanh(g),   h_t = sigma(o) tanh(c_t)

for p [T, lane, B, 4H] and W [lane, 4H, H], from h_0 = c_0 = 0. Backwards, from the last t to the first,

    dh = dh_t + da_{t+1} W,   dc, da_t by the cell's derivative,   and at the end  dW = sum over t of da_t^T h_{t-1}

With `vmap` and autograd alone, a step of two layers over 80 characters is thousands of small kernels. Here a
character is one matrix product and one cell in each direction, and W's gradient one product for all characters. On a
GPU the cell is the fused one of `nn.LSTMCell`. Computed in float32, because c accumulates over the whole text. If p
has 16 bits, h and the factors of products have 16 bits too, and c and the gates stay in float32. One kernel then
processes the whole text (`gpu/lstm.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction

from fedpara.engines.batched.kernels.ops import OPS, Dims, computed_in, differentiate, fold, register, unfold
from fedpara.models.lstm import LSTMLayer

Three = tuple[Tensor, Tensor, Tensor]

KERNEL_SIZES = (32, 64, 128, 256)
"""Sizes of h that the kernels support: all of h is one side of a product."""


def recur(p: Tensor, w: Tensor) -> Tensor:
    """p [T, B, 4H], w [4H, H] to h [T, B, H]: `models.lstm.unrolled` for one client."""
    h, _, _ = OPS.lanes_lstm(p.float()[:, None], w.float()[None])
    return h[:, 0]  # type: ignore[no-any-return]


def recur_in_kernels(p: Tensor, w: Tensor) -> Tensor:
    """The same in 16 bits under autocast; otherwise `recur`."""
    dtype = computed_in(p)
    if dtype.itemsize != 2:
        return recur(p, w)
    h, _, _ = OPS.lanes_lstm(p.to(dtype)[:, None], w.to(dtype)[None])
    return h[:, 0]  # type: ignore[no-any-return]


def use_lane_lstm(model: nn.Module, kernels: bool = False) -> nn.Module:
    """Replaces the recurrence of every `LSTMLayer` in place; parameters and their names stay."""
    for module in model.modules():
        if isinstance(module, LSTMLayer):
            fits = kernels and module.weight_hh.shape[1] in KERNEL_SIZES
            module.recurrence = recur_in_kernels if fits else recur
    return model


def _forward(p: Tensor, w: Tensor) -> Three:
    """h and c [T, l, B, H], and the gates after their sigma and tanh [T, l, B, 4H]"""
    if p.dtype.itemsize == 2:
        return _forward_in_16_bits(p, w)
    zero = p.new_zeros(*p.shape[1:3], w.shape[2])
    h, c, gates, turned = [zero], [zero], [], w.mT
    with torch.autocast(p.device.type, enabled=False):
        cell = _fused_cell if p.is_cuda else _cell
        for p_t in p:
            h_t, c_t, gates_t = cell(p_t, torch.bmm(h[-1], turned), c[-1])
            h.append(h_t)
            c.append(c_t)
            gates.append(gates_t)
        return torch.stack(h[1:]), torch.stack(c[1:]), torch.stack(gates)


def _backward(dh: Tensor, h: Tensor, c: Tensor, gates: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """dp [T, l, B, 4H] and dw [l, 4H, H]"""
    with torch.autocast(h.device.type, enabled=False):
        da = _back_in_16_bits(dh, c, gates, w) if h.dtype.itemsize == 2 else _back(dh, c, gates, w)
        before = torch.cat([torch.zeros_like(h[:1]), h[:-1]])
        by_lane = [tensor.transpose(0, 1).flatten(1, 2) for tensor in (da, before)]  # [l, T B, ...]
        return da, torch.bmm(by_lane[0].mT, by_lane[1])


def _back(dh: Tensor, c: Tensor, gates: Tensor, w: Tensor) -> Tensor:
    """da [T, l, B, 4H]"""
    zero = torch.zeros_like(c[0])
    dc, da = zero, torch.zeros_like(gates[0])
    every: list[Tensor] = []
    cell = _fused_cell_backward if dh.is_cuda else _cell_backward
    for t in reversed(range(len(dh))):
        da, dc = cell(torch.baddbmm(dh[t], da, w), dc, c[t - 1] if t else zero, c[t], gates[t])
        every.append(da)
    return torch.stack(every[::-1])


def _forward_in_16_bits(p: Tensor, w: Tensor) -> Three:
    if p.is_cuda:
        from fedpara.engines.batched.kernels.gpu import lstm as kernels

        return kernels.forward(p, w)
    h, c, gates = _forward(p.float(), w.float())
    return h.to(p.dtype), c, gates


def _back_in_16_bits(dh: Tensor, c: Tensor, gates: Tensor, w: Tensor) -> Tensor:
    if dh.is_cuda:
        from fedpara.engines.batched.kernels.gpu import lstm as kernels

        return kernels.backward(dh, c, gates, w)
    return _back(dh.float(), c, gates, w.float()).to(dh.dtype)


def _cell(p: Tensor, hidden: Tensor, c: Tensor) -> Three:
    i, f, g, o = (p + hidden).chunk(4, dim=-1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], dim=-1)


def _cell_backward(dh: Tensor, dc: Tensor, before: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, dim=-1)
    bent = c.tanh()
    dc = dc + dh * o * (1 - bent.square())
    da = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g.square()), dh * bent * o * (1 - o)]
    return torch.cat(da, dim=-1), dc * f


def _fused_cell(p: Tensor, hidden: Tensor, c: Tensor) -> Three:
    flat = [tensor.flatten(0, 1) for tensor in (p, hidden, c)]
    made = torch.ops.aten._thnn_fused_lstm_cell(*flat)
    return tuple(tensor.unflatten(0, p.shape[:2]) for tensor in made)


def _fused_cell_backward(
    dh: Tensor, dc: Tensor, before: Tensor, c: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    flat = [tensor.flatten(0, 1) for tensor in (dh, dc, before, c, gates)]
    da, dc, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, False)
    return da.unflatten(0, dh.shape[:2]), dc.unflatten(0, dh.shape[:2])


class _Derivative(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, below: Any, p: Tensor, w: Tensor) -> Three:
        h, c, gates = below(p, w)
        ctx.save_for_backward(h, c, gates, w)
        ctx.mark_non_differentiable(c, gates)
        return h, c, gates

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (None, *OPS.lanes_lstm_backward(grads[0].contiguous(), *ctx.saved_tensors))


def _lanes_forward(info: Any, dims: Dims, p: Tensor, w: Tensor) -> tuple[Sequence[Tensor], Sequence[int]]:
    size = info.batch_size
    made = OPS.lanes_lstm(fold(p, dims[0], size, 1), fold(w, dims[1], size))
    return tuple(unfold(tensor, size, 1) for tensor in made), (1, 1, 1)


def _lanes_backward(
    info: Any, dims: Dims, dh: Tensor, h: Tensor, c: Tensor, gates: Tensor, w: Tensor
) -> tuple[Sequence[Tensor], Sequence[int]]:
    size = info.batch_size
    over_time = [fold(t, dim, size, 1) for t, dim in zip((dh, h, c, gates), dims[:4], strict=True)]
    dp, dw = OPS.lanes_lstm_backward(*over_time, fold(w, dims[4], size))
    return (unfold(dp, size, 1), unfold(dw, size)), (1, 0)


def _empty(p: Tensor, w: Tensor) -> Three:
    h = p.new_empty(*p.shape[:3], w.shape[2])
    exact = torch.promote_types(p.dtype, torch.float32)
    return h, torch.empty_like(h, dtype=exact), torch.empty_like(p, dtype=exact)


register(
    "lanes_lstm",
    "(Tensor p, Tensor w) -> (Tensor h, Tensor c, Tensor gates)",
    _forward,
    _empty,
    _lanes_forward,
)
register(
    "lanes_lstm_backward",
    "(Tensor dh, Tensor h, Tensor c, Tensor gates, Tensor w) -> (Tensor dp, Tensor dw)",
    _backward,
    lambda dh, h, c, gates, w: (torch.empty_like(gates, dtype=h.dtype), torch.empty_like(w)),
    _lanes_backward,
)
differentiate("lanes_lstm", _Derivative)
