"""Convolutions of stacked clients, each with a kernel of its own, as one program.

    y[l, b, p, o] = bias[l, o] + sum over taps t and channels c of  x[l, b, p + t, c] w[l, o, t, c]

for lanes l, images b, pixels p = (h, w) and taps t centred on 0: stride 1, zeros around the image, so y is as
large as x. Everything lies channels-last and contiguous, [lane, image, h, w, channel] and [lane, o, i, j, c]. A
tensor in another order is copied outside the ops, where a compiled step writes it in the order asked for at once.

`vmap` of `conv2d` alone is a grouped convolution, which cuDNN slices by group. On a GPU these ops are the kernels
of `convolution_kernels.py`; elsewhere they are torch's own convolution, lane by lane. They can be differentiated once.

A layer of few input channels, as the first, is too thin for them: its taps and channels, side by side in columns,
are one matrix product an image.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.functional import conv2d, pad
from torch.nn.functional import unfold as columns_of
from torch.nn.grad import conv2d_input, conv2d_weight

from fedpara.engines.batched.kernels.ops import OPS, Dims, computed_in, differentiate, fold, register, unfold

CHANNELS = 64
"""A kernel's tile takes this many at a time: a layer with others stays with cuDNN, unless it is thin."""

THIN = 32
"""Taps times input channels of a thin layer, at most; its columns are filled up to as many."""


class LanesConv2d(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = computed_in(input)
        if input.is_cuda and dtype.itemsize != 2:
            return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        x, w = (t.to(dtype).movedim(1, -1).contiguous()[None] for t in (input, weight))
        y: Tensor = OPS.lanes_conv2d(x, w, None if bias is None else bias[None])
        return y[0].movedim(-1, 1)


class ThinConv2d(nn.Conv2d):
    """y[b, p, o] = bias[o] + sum over taps and channels k of  columns[b, k, p] w[o, k]

    The kernel stands once an image, not once for all: its gradient is then a product an image, and a sum.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = computed_in(input)
        if input.is_cuda and dtype.itemsize != 2:
            return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        x, w = input.to(dtype), weight.to(dtype).flatten(1)
        fill, shape = THIN - w.shape[1], (self.kernel_size, self.dilation, self._padding, self.stride)
        columns = pad(columns_of(x, *shape), (0, 0, 0, fill))
        kernels = pad(w, (0, fill)).t().expand(len(x), -1, -1)
        y = columns.transpose(1, 2) @ kernels
        if bias is not None:
            y = y + bias.to(dtype)
        image: Tensor = y.unflatten(1, self._out(input)).movedim(-1, 1)
        return image

    @property
    def _padding(self) -> tuple[int, int]:
        return self.padding  # type: ignore[return-value]  # a word in others, which are not thin

    def _out(self, input: Tensor) -> tuple[int, ...]:
        """Height and width of the result."""
        sizes = zip(
            input.shape[-2:], self._padding, self.dilation, self.kernel_size, self.stride, strict=True
        )
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes)


def use_lane_convs(model: nn.Module) -> nn.Module:
    """Turns, in place, the convolutions that fit into `LanesConv2d` or `ThinConv2d`; their parameters stay."""
    for module in model.modules():
        if type(module) is nn.Conv2d and fits(module):
            module.__class__ = LanesConv2d
        elif type(module) is nn.Conv2d and is_thin(module):
            module.__class__ = ThinConv2d
    return model


def is_thin(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == 1
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
        and conv.weight[0].numel() <= THIN
    )


def fits(conv: nn.Conv2d) -> bool:
    """Stride 1, as large out as in, no groups, channels in whole tiles."""
    kernel = conv.kernel_size
    return (
        all(k % 2 for k in kernel)
        and conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding in ("same", tuple(k // 2 for k in kernel))
        and conv.padding_mode == "zeros"
        and conv.in_channels % CHANNELS == 0
        and conv.out_channels % CHANNELS == 0
    )


def _forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x [l, b, h, w, c], w [l, o, i, j, c], bias [l, o] to y [l, b, h, w, o]"""
    if x.is_cuda:
        from fedpara.engines.batched.kernels import conv_triton as kernels

        return kernels.forward(x, w, bias)
    pad = _padding(w.shape[2:4])
    biases = [None] * len(x) if bias is None else list(bias.to(x.dtype))
    return _lane_by_lane(
        [conv2d(_nchw(i), _nchw(k), b, padding=pad) for i, k, b in zip(x, w, biases, strict=True)]
    )


def _input_gradient(dy: Tensor, w: Tensor) -> Tensor:
    """dx[l, b, p, c] = sum over t, o of  dy[l, b, p - t, o] w[l, o, t, c]"""
    if dy.is_cuda:
        from fedpara.engines.batched.kernels import conv_triton as kernels

        return kernels.input_gradient(dy, w)
    pad, shape = _padding(w.shape[2:4]), (dy.shape[1], w.shape[4], *dy.shape[2:4])
    return _lane_by_lane(
        [conv2d_input(shape, _nchw(k), _nchw(g), padding=pad) for g, k in zip(dy, w, strict=True)]
    )


def _weight_gradient(x: Tensor, dy: Tensor, kernel: Sequence[int]) -> Tensor:
    """dw[l, o, t, c] = sum over b, p of  dy[l, b, p, o] x[l, b, p + t, c]"""
    if x.is_cuda:
        from fedpara.engines.batched.kernels import conv_triton as kernels

        return kernels.weight_gradient(x, dy, kernel)
    pad, shape = _padding(kernel), (dy.shape[4], x.shape[4], *kernel)
    return _lane_by_lane(
        [conv2d_weight(_nchw(i), shape, _nchw(g), padding=pad) for i, g in zip(x, dy, strict=True)]
    )


def _padding(kernel: Sequence[int]) -> tuple[int, int]:
    return kernel[0] // 2, kernel[1] // 2


def _nchw(tensor: Tensor) -> Tensor:
    return tensor.movedim(-1, 1)


def _lane_by_lane(results: list[Tensor]) -> Tensor:
    return torch.stack([lane.movedim(1, -1) for lane in results])


class _Derivative(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, below: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.bias = None if bias is None else bias.dtype
        y: Tensor = below(x, w, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """The bias's gradient is left to the compiler, which has dy in hand when it makes it."""
        x, w = ctx.saved_tensors
        dy = grads[0].contiguous()
        _, for_x, for_w, for_bias = ctx.needs_input_grad
        return (
            None,
            OPS.lanes_conv2d_dx(dy, w) if for_x else None,
            OPS.lanes_conv2d_dw(x, dy, list(w.shape[2:4])) if for_w else None,
            dy.sum((1, 2, 3), dtype=ctx.bias) if for_bias else None,
        )


def _lanes_forward(info: Any, dims: Dims, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
    size = info.batch_size
    folded = None if bias is None else fold(bias, dims[2], size)
    return unfold(OPS.lanes_conv2d(fold(x, dims[0], size), fold(w, dims[1], size), folded), size), 0


def _lanes_input_gradient(info: Any, dims: Dims, dy: Tensor, w: Tensor) -> tuple[Tensor, int]:
    size = info.batch_size
    return unfold(OPS.lanes_conv2d_dx(fold(dy, dims[0], size), fold(w, dims[1], size)), size), 0


def _lanes_weight_gradient(
    info: Any, dims: Dims, x: Tensor, dy: Tensor, kernel: Sequence[int]
) -> tuple[Tensor, int]:
    size = info.batch_size
    return unfold(OPS.lanes_conv2d_dw(fold(x, dims[0], size), fold(dy, dims[1], size), kernel), size), 0


register(
    "lanes_conv2d",
    "(Tensor x, Tensor w, Tensor? bias) -> Tensor",
    _forward,
    lambda x, w, bias: x.new_empty((*x.shape[:4], w.shape[1])),
    _lanes_forward,
)
register(
    "lanes_conv2d_dx",
    "(Tensor dy, Tensor w) -> Tensor",
    _input_gradient,
    lambda dy, w: dy.new_empty((*dy.shape[:4], w.shape[4])),
    _lanes_input_gradient,
)
register(
    "lanes_conv2d_dw",
    "(Tensor x, Tensor dy, int[] kernel) -> Tensor",
    _weight_gradient,
    lambda x, dy, kernel: x.new_empty((len(x), dy.shape[4], *kernel, x.shape[4])),
    _lanes_weight_gradient,
)
differentiate("lanes_conv2d", _Derivative)
