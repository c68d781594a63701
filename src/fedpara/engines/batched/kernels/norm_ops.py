"""GroupNorm, ReLU and pooling of stacked clients as one op.

    y = max(GroupNorm(x), 0), or its maximum over squares of 2 x 2 pixels

`LanesSequential` uses it where a `Sequential` has these layers in a row: nothing else can see what is between them.
On a GPU each pass reads an image once and keeps it in registers (`norm_triton.py`); elsewhere the op is torch's
layers, lane by lane. Images are as in `conv.py`. It can be differentiated once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.functional import group_norm, max_pool2d, max_unpool2d, relu

from fedpara.engines.batched.kernels.conv import channels_last
from fedpara.engines.batched.kernels.ops import (
    OPS,
    Dims,
    differentiate,
    into_lanes,
    out_of_lanes,
    register,
)

ROOM = 1 << 14
"""Numbers that a program keeps: with two such blocks in float32, 512 threads still have registers."""
CHANNELS = 16
"""The fewest channels of a program: 32 neighbouring bytes, the least that memory delivers."""


WIDE = 32
"""Channels above which a program keeps fewer numbers, so that more programs run at a time."""


class LanesSequential(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for norm, pool, layers in _rows(list(self)):
            if norm is not None and fits(norm, input):
                pooled = pool and input.shape[-1] % 2 == input.shape[-2] % 2 == 0
                x = channels_last(input)
                input = OPS.lanes_norm_relu(x, norm.weight, norm.bias, norm.num_groups, norm.eps, pooled)
                layers = layers[3 if pooled else 2 :]
            for layer in layers:
                input = layer(input)
        return input


def use_fused_norms(model: nn.Module) -> nn.Module:
    """Replaces every `Sequential` in place; parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.Sequential:
            module.__class__ = LanesSequential
    return model


def _rows(layers: list[nn.Module]) -> Iterator[tuple[nn.GroupNorm | None, bool, list[nn.Module]]]:
    """The layers in order: a norm, a ReLU and perhaps a pooling together, others alone."""
    while layers:
        norm, taken, pool = layers[0], 1, False
        if isinstance(norm, nn.GroupNorm) and len(layers) > 1 and type(layers[1]) is nn.ReLU:
            pool = len(layers) > 2 and halves(layers[2])
            taken = 3 if pool else 2
        row, layers = layers[:taken], layers[taken:]
        # A hook sees what its layer returns.
        alone = taken == 1 or any(layer._forward_hooks or layer._forward_pre_hooks for layer in row)
        yield None if alone else norm, pool, row  # type: ignore[misc]


def halves(layer: nn.Module) -> bool:
    """Whether the layer is the maximum over squares of 2 x 2 pixels."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    two = ((2, 2), 2)
    return (
        layer.kernel_size in two
        and layer.stride in two
        and layer.padding in ((0, 0), 0)
        and layer.dilation in ((1, 1), 1)
    )


def fits(norm: nn.GroupNorm, input: Tensor) -> bool:
    """Whether the input is a 16-bit image on a GPU that a program can keep."""
    if not (norm.affine and input.dim() == 4 and input.is_cuda and input.dtype.itemsize == 2):
        return False
    c, h, w = input.shape[1:]
    return block(c, h, w, c // norm.num_groups) is not None


def block(c: int, h: int, w: int, size: int) -> int | None:
    """The channels that a program keeps, a power of two of whole groups of this size; None if there is no room."""
    channels = max(CHANNELS, size)
    if size & (size - 1) or c % channels or power(h * w) * channels > ROOM:
        return None
    while c % (2 * channels) == 0 and power(h * w) * 2 * channels <= (ROOM if channels < WIDE else ROOM // 4):
        channels *= 2
    return channels


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def _layers(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool) -> Tensor:
    """One lane: x [b, c, h, w], weight and bias [c]."""
    z = relu(group_norm(x, groups, weight.to(x.dtype), bias.to(x.dtype), eps))
    return max_pool2d(z, 2) if pool else z


def _forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool) -> Tensor:
    """x [l, b, c, h, w], weight and bias [l, c] to y [l, b, c, h, w], half as high and wide if pooled"""
    if x.dim() == 4:
        return _forward(x[None], weight[None], bias[None], groups, eps, pool)[0]
    if x.is_cuda:
        from fedpara.engines.batched.kernels import norm_triton as kernels

        return kernels.forward(x.movedim(2, -1), weight, bias, groups, eps, pool).movedim(-1, 2)
    lanes = zip(x, weight, bias, strict=True)
    return channels_last(torch.stack([_layers(*lane, groups, eps, pool) for lane in lanes]))


def _backward(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight and bias image by image, [l, b, 2, c]

    dz = dy where it is the maximum and above 0,   dweight = sum of dz hat,   dbias = sum of dz,   g = dz weight
    dx = (g - mean of g - hat (mean of g hat)) / deviation      hat: x with mean 0 and deviation 1, means over groups
    """
    if x.dim() == 4:
        dx, parts = _backward(x[None], dy[None], weight[None], bias[None], groups, eps, pool)
        return dx[0], parts[0]
    if x.is_cuda:
        from fedpara.engines.batched.kernels import norm_triton as kernels

        images = x.movedim(2, -1), dy.movedim(2, -1)
        dx, parts = kernels.backward(*images, weight, bias, groups, eps, pool)
        return dx.movedim(-1, 2), parts
    wide = torch.promote_types(x.dtype, torch.float32)
    grouped = x.to(wide).unflatten(2, (groups, -1))
    variance, mean = torch.var_mean(grouped, (3, 4, 5), correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    hat = ((grouped - mean) * scale).flatten(2, 3)
    w, b = (t.to(wide)[:, None, :, None, None] for t in (weight, bias))
    z = (hat * w + b).to(x.dtype)
    dz = dy.to(wide)
    if pool:
        places = max_pool2d(z.flatten(0, 1), 2, return_indices=True)[1]
        dz = max_unpool2d(dz.flatten(0, 1), places, [2, 2], output_size=x.shape[3:]).view(x.shape)
    dz = dz * (z > 0)
    g, each = (dz * w).unflatten(2, (groups, -1)), hat.unflatten(2, (groups, -1))
    means = (t.mean((3, 4, 5), keepdim=True) for t in (g, g * each))
    dx = ((g - next(means) - each * next(means)) * scale).flatten(2, 3)
    parts = torch.stack([(dz * hat).sum((3, 4)), dz.sum((3, 4))], 2)
    return channels_last(dx.to(x.dtype)), parts.float()


class _Derivative(_SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, below: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.constants = groups, eps, pool
        y: Tensor = below(x, weight, bias, groups, eps, pool)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dx, parts = OPS.lanes_norm_relu_backward(x, channels_last(grads[0]), weight, bias, *ctx.constants)
        dw, db = parts.sum(-3).to(weight.dtype).unbind(-2)
        return None, dx, dw, db, None, None, None


def _lanes_forward(
    info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Tensor, *constants: Any
) -> tuple[Tensor, int]:
    size, more = info.batch_size, x.dim() - (dims[0] is not None) == 5
    x, weight, bias = (
        into_lanes(t, dim, size, more) for t, dim in zip((x, weight, bias), dims, strict=False)
    )
    return out_of_lanes(_called("lanes_norm_relu", (x,), (weight, bias), constants), size, more), 0


def _lanes_backward(
    info: Any, dims: Dims, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, *constants: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    size, more = info.batch_size, x.dim() - (dims[0] is not None) == 5
    given = [into_lanes(t, dim, size, more) for t, dim in zip((x, dy, weight, bias), dims, strict=False)]
    made = _called("lanes_norm_relu_backward", given[:2], given[2:], constants)
    return tuple(out_of_lanes(t, size, more) for t in made), (0, 0)


def _called(name: str, images: Any, affine: Any, constants: Any) -> Any:
    return getattr(OPS, name)(
        *(channels_last(t) for t in images), *(t.contiguous() for t in affine), *constants
    )


def _empty(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool) -> Tensor:
    high, wide = (size // 2 if pool else size for size in x.shape[-2:])
    return x.new_empty((*x.shape[:-3], high, wide, x.shape[-3])).movedim(-1, -3)


register(
    "lanes_norm_relu",
    "(Tensor x, Tensor weight, Tensor bias, int groups, float eps, bool pool) -> Tensor",
    _forward,
    _empty,
    _lanes_forward,
)
register(
    "lanes_norm_relu_backward",
    "(Tensor x, Tensor dy, Tensor weight, Tensor bias, int groups, float eps, bool pool) -> (Tensor, Tensor)",
    _backward,
    lambda x, dy, weight, bias, groups, eps, pool: (
        _empty(x, weight, bias, groups, eps, False),
        x.new_empty((*x.shape[:-3], 2, x.shape[-3]), dtype=torch.float32),
    ),
    _lanes_backward,
)
differentiate("lanes_norm_relu", _Derivative)
