"""FedPara's weights of stacked clients, composed in one pass over memory.

    W[m, n] = W1[m, n] (W2[m, n] + shift),   W_i = A_i Y_i^T        shift 0 for FedPara, 1 for pFedPara

for matrices with A_i = X_i, and for kernels W[(o, k), i] with A_i[(o, k), b] = sum over a of  X_i[o, a] T_i[a, b, k].
On a GPU W1 and W2 are not written to memory (`gpu/hadamard.py`), and neither are their gradients up to a rank of
RANK (`gpu/hadamard_wide.py` for larger ones); elsewhere the op is torch's products. It can be differentiated once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.nn.functional import pad

from fedpara.engines.batched.kernels.ops import (
    OPS,
    Dims,
    computed_in,
    differentiate,
    into_lanes,
    out_of_lanes,
    register,
)
from fedpara.parameterization import FedPara, Form, PFedPara
from fedpara.parameterization.compose import core_rows

SHIFTS = {FedPara: 0.0, PFedPara: 1.0}
RANK = 64
"""The largest rank whose sums fit in the registers of one program, with room for the tiles it reads."""
MULTIPLE = 8
"""The rank is padded to a multiple: 16 bytes are read at once."""


class FusedForm(Form):
    """A form whose weight is composed by the op, if the products are in 16 bits."""

    def compose_onto(self, base: Tensor | None, factors: Sequence[Tensor]) -> Tensor:
        dtype = computed_in(factors[0])
        if dtype.itemsize != 2:
            return super().compose_onto(base, factors)
        each, spare = len(factors) // 2, -self.rank % MULTIPLE
        x, y, *t = (torch.stack(list(same)) for same in zip(factors[:each], factors[each:], strict=True))
        a = core_rows(x, t[0], spare) if self.is_kernel else pad(x, (0, spare))
        w = OPS.lanes_hadamard(a.to(dtype), pad(y, (0, spare)).to(dtype), SHIFTS[type(self.scheme)])
        if self.is_kernel:
            w = w.unflatten(0, (self.shape[0], *self.shape[2:])).movedim(-1, 1)
        return self.placed(w.reshape(self.shape), base)


def fused(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The forms, with a FusedForm in place of each one that the op supports."""
    return {name: _fused(form) if fits(form) else form for name, form in forms.items()}


def fits(form: Form) -> bool:
    return type(form.scheme) in SHIFTS and form.scheme.nonlinearity is None


def _fused(form: Form) -> FusedForm:
    return FusedForm(**{field.name: getattr(form, field.name) for field in fields(form)})


class _Kernels(Protocol):
    def forward(self, a: Tensor, y: Tensor, shift: float) -> Tensor: ...

    def backward(self, a: Tensor, y: Tensor, dw: Tensor, shift: float) -> tuple[Tensor, Tensor]: ...


def _kernels(rank: int) -> _Kernels:
    from fedpara.engines.batched.kernels.gpu import hadamard, hadamard_wide

    return hadamard if rank <= RANK else hadamard_wide


def _compose(a: Tensor, y: Tensor, shift: float) -> Tensor:
    """a [l, 2, m, r], y [l, 2, n, r] to w [l, m, n], in their type. One client's may lack the first dimension."""
    if a.dim() == 3:
        return _compose(a[None], y[None], shift)[0]
    if a.is_cuda:
        return _kernels(a.shape[-1]).forward(a.contiguous(), y.contiguous(), shift)
    w1, w2 = (a @ y.mT).unbind(1)
    return w1 * (w2 + shift)


def _gradients(a: Tensor, y: Tensor, dw: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """G1 = dW (W2 + shift),  G2 = dW W1,  dA_i = G_i Y_i,  dY_i = G_i^T A_i"""
    if a.dim() == 3:
        da, dy = _gradients(a[None], y[None], dw[None], shift)
        return da[0], dy[0]
    if a.is_cuda:
        return _kernels(a.shape[-1]).backward(a.contiguous(), y.contiguous(), dw.contiguous(), shift)
    w1, w2 = (a @ y.mT).unbind(1)
    g = torch.stack([dw * (w2 + shift), dw * w1], 1)
    return g @ y, g.mT @ a


class _Derivative(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, below: Any, a: Tensor, y: Tensor, shift: float) -> Tensor:
        ctx.save_for_backward(a, y)
        ctx.shift = shift
        w: Tensor = below(a, y, shift)
        return w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        a, y = ctx.saved_tensors
        da, dy = OPS.lanes_hadamard_backward(a, y, grads[0], ctx.shift)
        return None, da, dy, None


def _composed_lanes(info: Any, dims: Dims, a: Tensor, y: Tensor, shift: float) -> tuple[Tensor, int]:
    size, more = info.batch_size, a.dim() - (dims[0] is not None) == 4
    given = [into_lanes(t, dim, size, more) for t, dim in zip((a, y), dims, strict=False)]
    return out_of_lanes(OPS.lanes_hadamard(*given, shift), size, more), 0


def _gradients_of_lanes(
    info: Any, dims: Dims, a: Tensor, y: Tensor, dw: Tensor, shift: float
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    size, more = info.batch_size, a.dim() - (dims[0] is not None) == 4
    given = [into_lanes(t, dim, size, more) for t, dim in zip((a, y, dw), dims, strict=False)]
    made = OPS.lanes_hadamard_backward(*given, shift)
    return tuple(out_of_lanes(t, size, more) for t in made), (0, 0)


register(
    "lanes_hadamard",
    "(Tensor a, Tensor y, float shift) -> Tensor",
    _compose,
    lambda a, y, shift: a.new_empty((*a.shape[:-3], a.shape[-2], y.shape[-2])),
    _composed_lanes,
)
register(
    "lanes_hadamard_backward",
    "(Tensor a, Tensor y, Tensor dw, float shift) -> (Tensor, Tensor)",
    _gradients,
    lambda a, y, dw, shift: (torch.empty_like(a), torch.empty_like(y)),
    _gradients_of_lanes,
)
differentiate("lanes_hadamard", _Derivative)
