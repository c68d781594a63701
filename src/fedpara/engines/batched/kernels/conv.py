"""Convolutions of stacked clients, each with its own kernel, as one program.

    y[l, b, p, o] = bias[l, o] + sum over taps t and channels c of  x[l, b, p + t, c] w[l, o, t, c]

for lanes l, images b, pixels p = (h, w) and taps t centred on 0: stride 1 and zero padding, so y is as large as x.
Images have torch's shape, [lane, image, channel, h, w], with the channels last in memory; kernels are
[lane, o, i, j, c]. One lane's tensors may lack the first dimension. Other orders are copied outside the ops, where a
compiled step writes the right order at once. An op's inputs are never views of what the step computes: a compiler
would write a copy for every op that reads them.

`vmap` of `conv2d` alone is a grouped convolution, which cuDNN runs group by group. On a GPU these ops are the kernels
of `gpu/conv.py`; elsewhere they call torch's convolution lane by lane. They can be differentiated once.

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

from fedpara.engines.batched.kernels.ops import (
    OPS,
    Dims,
    computed_in,
    differentiate,
    into_lanes,
    out_of_lanes,
    register,
)

CHANNELS = 64
"""Channels per tile. `LanesConv2d` needs input and output channels in multiples of this."""

THIN = 32
"""The largest number of taps times input channels in a thin layer. Its columns are padded to this."""


class LanesConv2d(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = computed_in(input)
        if input.is_cuda and dtype.itemsize != 2:
            return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        x, w = channels_last(input.to(dtype)), weight.to(dtype).movedim(1, -1).contiguous()
        y: Tensor = OPS.lanes_conv2d(x, w, bias)
        return y


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
        taps = _taps(self, input.to(dtype))
        columns = torch.cat(taps, -1) if len(taps) > 1 else taps[0]
        kernel = weight.to(dtype).movedim(1, -1).flatten(1)
        y = columns.flatten(0, 2) @ kernel.t()
        if bias is not None:
            y = y + bias.to(dtype)
        made: Tensor = y.view(*taps[0].shape[:3], -1).movedim(-1, 1)
        return made


class DepthwiseConv2d(nn.Conv2d):
    """y[b, p, c] = bias[c] + sum over taps t of  x[b, stride p + t, c] w[c, t]

    One strided slice of the padded image per tap, times a number per channel: a compiled step reads the image once.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = computed_in(input)
        if input.is_cuda and dtype.itemsize != 2:
            return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        taps = _taps(self, input.to(dtype))
        kernel = weight.to(dtype).flatten(1).t().float()
        y = sum(tap.float() * w for tap, w in zip(taps, kernel, strict=True))
        if bias is not None:
            y = y + bias
        made: Tensor = y.to(dtype).movedim(-1, 1)
        return made


def _taps(conv: nn.Conv2d, input: Tensor) -> list[Tensor]:
    """What each tap of the kernel reads, as [image, h, w, channel]; the dilation is 1."""
    (ph, pw), (sh, sw), (kh, kw) = _number(conv.padding), conv.stride, conv.kernel_size
    image = pad(input.movedim(1, -1), (0, 0, pw, pw, ph, ph))
    high, wide = (image.shape[1] - kh) // sh + 1, (image.shape[2] - kw) // sw + 1
    return [
        image[:, i : i + sh * (high - 1) + 1 : sh, j : j + sw * (wide - 1) + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]


def _number(padding: str | tuple[int, ...]) -> tuple[int, ...]:
    """The layer's padding as numbers. The predicates that choose these layers exclude string paddings."""
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
        elif type(module) is nn.Conv2d and is_depthwise(module):
            module.__class__ = DepthwiseConv2d
    return model


def is_thin(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == 1
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
        and conv.weight[0].numel() <= THIN
    )


def is_depthwise(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and conv.dilation == (1, 1)
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
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


def channels_last(images: Tensor) -> Tensor:
    """The images with their channels last in memory, copied only if they are not."""
    size = 1
    for dim in (-3, -1, -2, *range(-4, -images.dim() - 1, -1)):
        if images.shape[dim] != 1 and images.stride(dim) != size:
            return images.movedim(-3, -1).contiguous().movedim(-1, -3)
        size *= images.shape[dim]
    return images


def _forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x [l, b, c, h, w], w [l, o, i, j, c], bias [l, o] to y [l, b, o, h, w]"""
    if w.dim() == 4:
        return _forward(x[None], w[None], None if bias is None else bias[None])[0]
    if x.is_cuda:
        from fedpara.engines.batched.kernels.gpu import conv as kernels

        return kernels.forward(x.movedim(2, -1), w, bias).movedim(-1, 2)
    pad = _padding(w.shape[2:4])
    biases = [None] * len(x) if bias is None else list(bias.to(x.dtype))
    lanes = zip(x, w, biases, strict=True)
    return channels_last(torch.stack([conv2d(i, _oihw(k), b, padding=pad) for i, k, b in lanes]))


def _input_gradient(dy: Tensor, w: Tensor) -> Tensor:
    """dx[l, b, p, c] = sum over t, o of  dy[l, b, p - t, o] w[l, o, t, c]"""
    if w.dim() == 4:
        return _input_gradient(dy[None], w[None])[0]
    if dy.is_cuda:
        from fedpara.engines.batched.kernels.gpu import conv as kernels

        return kernels.input_gradient(dy.movedim(2, -1), w).movedim(-1, 2)
    pad, shape = _padding(w.shape[2:4]), (dy.shape[1], w.shape[4], *dy.shape[3:])
    lanes = zip(dy, w, strict=True)
    return channels_last(torch.stack([conv2d_input(shape, _oihw(k), g, padding=pad) for g, k in lanes]))


def _weight_gradient(x: Tensor, dy: Tensor, kernel: Sequence[int]) -> Tensor:
    """dw[l, o, t, c] = sum over b, p of  dy[l, b, p, o] x[l, b, p + t, c]"""
    if x.dim() == 4:
        return _weight_gradient(x[None], dy[None], kernel)[0]
    if x.is_cuda:
        from fedpara.engines.batched.kernels.gpu import conv as kernels

        return kernels.weight_gradient(x.movedim(2, -1), dy.movedim(2, -1), kernel)
    pad, shape = _padding(kernel), (dy.shape[2], x.shape[2], *kernel)
    lanes = [conv2d_weight(i, shape, g, padding=pad) for i, g in zip(x, dy, strict=True)]
    return torch.stack(lanes).movedim(2, -1).contiguous()


def _padding(kernel: Sequence[int]) -> tuple[int, int]:
    return kernel[0] // 2, kernel[1] // 2


def _oihw(kernel: Tensor) -> Tensor:
    return kernel.movedim(-1, 1)


class _Derivative(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, below: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.bias = None if bias is None else bias.dtype
        y: Tensor = below(x, w, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """The bias's gradient is a torch sum, which the compiler fuses with the computation of dy."""
        x, w = ctx.saved_tensors
        dy = channels_last(grads[0])
        _, for_x, for_w, for_bias = ctx.needs_input_grad
        return (
            None,
            OPS.lanes_conv2d_dx(dy, w) if for_x else None,
            OPS.lanes_conv2d_dw(x, dy, list(w.shape[-3:-1])) if for_w else None,
            dy.sum((-4, -2, -1), dtype=ctx.bias) if for_bias else None,
        )


def _lanes_forward(info: Any, dims: Dims, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
    size, rank = info.batch_size, w.dim() - (dims[1] is not None)
    folded = None if bias is None else into_lanes(bias, dims[2], size, rank == 5).contiguous()
    y = OPS.lanes_conv2d(_fold_images(x, dims[0], size, rank), _fold_kernels(w, dims[1], size, rank), folded)
    return out_of_lanes(y, size, rank == 5), 0


def _lanes_input_gradient(info: Any, dims: Dims, dy: Tensor, w: Tensor) -> tuple[Tensor, int]:
    size, rank = info.batch_size, w.dim() - (dims[1] is not None)
    dx = OPS.lanes_conv2d_dx(_fold_images(dy, dims[0], size, rank), _fold_kernels(w, dims[1], size, rank))
    return out_of_lanes(dx, size, rank == 5), 0


def _lanes_weight_gradient(
    info: Any, dims: Dims, x: Tensor, dy: Tensor, kernel: Sequence[int]
) -> tuple[Tensor, int]:
    size, rank = info.batch_size, x.dim() - (dims[0] is not None)
    images = (_fold_images(t, dim, size, rank) for t, dim in zip((x, dy), dims, strict=False))
    return out_of_lanes(OPS.lanes_conv2d_dw(*images, kernel), size, rank == 5), 0


def _fold_images(tensor: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    return channels_last(into_lanes(tensor, dim, size, rank == 5))


def _fold_kernels(tensor: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    return into_lanes(tensor, dim, size, rank == 5).contiguous()


def _empty_images(like: Tensor, channels: int) -> Tensor:
    return like.new_empty((*like.shape[:-3], *like.shape[-2:], channels)).movedim(-1, -3)


register(
    "lanes_conv2d",
    "(Tensor x, Tensor w, Tensor? bias) -> Tensor",
    _forward,
    lambda x, w, bias: _empty_images(x, w.shape[-4]),
    _lanes_forward,
)
register(
    "lanes_conv2d_dx",
    "(Tensor dy, Tensor w) -> Tensor",
    _input_gradient,
    lambda dy, w: _empty_images(dy, w.shape[-1]),
    _lanes_input_gradient,
)
register(
    "lanes_conv2d_dw",
    "(Tensor x, Tensor dy, int[] kernel) -> Tensor",
    _weight_gradient,
    lambda x, dy, kernel: x.new_empty((*x.shape[:-4], dy.shape[-3], *kernel, x.shape[-3])),
    _lanes_weight_gradient,
)
differentiate("lanes_conv2d", _Derivative)
