"""Convolutions of stacked clients, each with its own kernel, as one program.

    y[l, b, p, o] = bias[l, o] + sum over taps t and channels c of  x[l, b, p + t, c] w[l, o, t, c]

for lanes l, images b, pixels p = (h, w) and taps t centred on 0: stride 1 and zero padding, so y is as large as x.
Tensors are channels-last and contiguous, [lane, image, h, w, channel] and [lane, o, i, j, c]. Other orders are copied
outside the ops, where a compiled step writes the right order at once.

`vmap` of `conv2d` alone is a grouped convolution, which cuDNN runs group by group. On a GPU these ops are the kernels
of `conv_triton.py`; elsewhere they call torch's convolution lane by lane. They can be differentiated once.

Other layers without groups become matrix products over columns of taps and channels: those with few input channels,
such as the first, with one product per image; those with a stride or with 1 x 1 kernels, whose columns are small.
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
"""Channels per tile of a kernel: a layer with another multiple stays with cuDNN, unless it is thin."""

THIN = 32
"""The most taps times input channels of a thin layer; its columns are padded to this."""


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

    The kernel is expanded per image, so that its gradient is one product per image and a sum.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = computed_in(input)
        if input.is_cuda and dtype.itemsize != 2:
            return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        x, w = input.to(dtype), weight.to(dtype).flatten(1)
        fill, shape = THIN - w.shape[1], (self.kernel_size, self.dilation, _number(self.padding), self.stride)
        columns = pad(columns_of(x, *shape), (0, 0, 0, fill))
        kernels = pad(w, (0, fill)).t().expand(len(x), -1, -1)
        y = columns.transpose(1, 2) @ kernels
        if bias is not None:
            y = y + bias.to(dtype)
        image: Tensor = y.unflatten(1, self._out(input)).movedim(-1, 1)
        return image

    def _out(self, input: Tensor) -> tuple[int, ...]:
        """Height and width of the result."""
        sizes = zip(
            input.shape[-2:], _number(self.padding), self.dilation, self.kernel_size, self.stride, strict=True
        )
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes)


class ColumnsConv2d(nn.Conv2d):
    """y[b, p, o] = bias[o] + sum over taps t and channels c of  x[b, stride p + t, c] w[o, t, c]

    The columns are one strided slice of the padded image per tap. cuDNN runs stacked clients' strided kernels as a
    grouped convolution, group by group.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = computed_in(input)
        if input.is_cuda and dtype.itemsize != 2:
            return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        (ph, pw), (sh, sw) = _number(self.padding), self.stride
        image = pad(input.to(dtype).movedim(1, -1), (0, 0, pw, pw, ph, ph))
        kh, kw = self.kernel_size
        high, wide = (image.shape[1] - kh) // sh + 1, (image.shape[2] - kw) // sw + 1
        taps = [
            image[:, i : i + sh * (high - 1) + 1 : sh, j : j + sw * (wide - 1) + 1 : sw]
            for i in range(kh)
            for j in range(kw)
        ]
        columns = torch.cat(taps, -1) if len(taps) > 1 else taps[0]
        kernel = weight.to(dtype).movedim(1, -1).flatten(1)
        y = columns.flatten(0, 2) @ kernel.t()
        if bias is not None:
            y = y + bias.to(dtype)
        made: Tensor = y.view(len(input), high, wide, -1).movedim(-1, 1)
        return made


def _number(padding: str | tuple[int, ...]) -> tuple[int, ...]:
    """The padding of a layer of which `is_thin` or `has_small_columns` holds: never a string."""
    return padding  # type: ignore[return-value]


def use_lane_convs(model: nn.Module) -> nn.Module:
    """Replaces suitable convolutions in place by one of the layers above; their parameters stay."""
    for module in model.modules():
        if type(module) is nn.Conv2d and fits(module):
            module.__class__ = LanesConv2d
        elif type(module) is nn.Conv2d and is_thin(module):
            module.__class__ = ThinConv2d
        elif type(module) is nn.Conv2d and has_small_columns(module):
            module.__class__ = ColumnsConv2d
    return model


def is_thin(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == 1
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
        and conv.weight[0].numel() <= THIN
    )


def has_small_columns(conv: nn.Conv2d) -> bool:
    """Whether its columns are at most 2.25 times as large as its input: a 3 x 3 kernel of stride 2, 1 x 1 kernels."""
    taps, step = conv.kernel_size[0] * conv.kernel_size[1], conv.stride[0] * conv.stride[1]
    return (
        conv.groups == 1
        and conv.dilation == (1, 1)
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
        and 4 * taps <= 9 * step
    )


def fits(conv: nn.Conv2d) -> bool:
    """Whether it has stride 1, same-size output, no groups, and channels in whole tiles."""
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
        """The bias's gradient is left to the compiler, which fuses it with the making of dy."""
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
