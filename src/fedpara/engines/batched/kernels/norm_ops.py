"""GroupNorm, ReLU and pooling of stacked clients as one op.

    y = max(GroupNorm(x), 0), or its maximum over squares of 2 x 2 pixels

`LanesSequential` uses it where a `Sequential` has these layers in a row: nothing else can see what is between them.
On a GPU in 16 bits it is a kernel in each direction (`norm_triton.py`). Images are as in `conv.py`. It can be
differentiated once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.functional import max_pool2d, max_unpool2d, relu

from fedpara.engines.batched.kernels.conv import channels_last
from fedpara.engines.batched.kernels.ops import (
    OPS,
    Dims,
    differentiate,
    into_lanes,
    out_of_lanes,
    register,
)

CHANNELS = 16
"""The smallest number of channels per program: 32 adjacent bytes, the size of the smallest memory access."""
IMAGE = 1 << 13
"""The largest number of an image's values per program. A program with the smallest number of channels may exceed it."""


class LanesSequential(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for norm, pool, layers in _rows(list(self)):
            if norm is not None and fits(norm, input):
                pooled = pool and input.shape[-1] % 2 == input.shape[-2] % 2 == 0
                x = channels_last(input)
                input, _ = OPS.lanes_norm_relu(x, norm.weight, norm.bias, norm.num_groups, norm.eps, pooled)
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
    """Whether the input is a 16-bit image on a GPU whose groups fit in a program."""
    if not (norm.affine and input.dim() == 4 and input.is_cuda and input.dtype.itemsize == 2):
        return False
    c, h, w = input.shape[1:]
    return block(c, h, w, c // norm.num_groups) is not None


def block(c: int, h: int, w: int, size: int) -> int | None:
    """The number of channels per program: a power of two that holds whole groups of this size, or None."""
    channels = max(CHANNELS, size)
    if size & (size - 1) or c % channels:
        return None
    while c % (2 * channels) == 0 and power(h * w) * 2 * channels <= IMAGE and channels < 512:
        channels *= 2
    return channels


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool
) -> tuple[Tensor, Tensor]:
    """x [l, b, c, h, w], weight and bias [l, c] to y [l, b, c, h, w], half as high and wide if pooled, and stats

    stats [l, b, 2, g] are the groups' means and 1 / deviations.
    """
    if x.dim() == 4:
        y, stats = _forward(x[None], weight[None], bias[None], groups, eps, pool)
        return y[0], stats[0]
    if x.is_cuda:
        from fedpara.engines.batched.kernels import norm_triton as kernels

        y, stats = kernels.forward(x.movedim(2, -1), weight, bias, groups, eps, pool)
        return y.movedim(-1, 2), stats
    grouped = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(2, (groups, -1))
    variance, mean = torch.var_mean(grouped, (3, 4, 5), correction=0)
    stats = torch.stack([mean, (variance + eps).rsqrt()], 2)
    y = relu(_affine(_hat(x, stats), weight, bias).to(x.dtype))
    y = max_pool2d(y.flatten(0, 1), 2).unflatten(0, x.shape[:2]) if pool else y
    return channels_last(y), stats


def _hat(x: Tensor, stats: Tensor) -> Tensor:
    """(x - mean) / deviation"""
    mean, scale = (t[..., None, None, None] for t in stats.unbind(2))
    grouped: Tensor = x.to(stats.dtype).unflatten(2, (stats.shape[-1], -1))
    return ((grouped - mean) * scale).flatten(2, 3)


def _affine(hat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    w, b = (t.to(hat.dtype)[:, None, :, None, None] for t in (weight, bias))
    return hat * w + b


def _backward(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, groups: int, pool: bool
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight and bias image by image, [l, b, 2, c]

    dz = dy where it is the maximum and above 0,   dweight = sum of dz hat,   dbias = sum of dz,   g = dz weight
    dx = (g - mean of g - hat (mean of g hat)) / deviation      hat: x with mean 0 and deviation 1, means over groups
    """
    if x.dim() == 4:
        dx, parts = _backward(x[None], dy[None], weight[None], bias[None], stats[None], groups, pool)
        return dx[0], parts[0]
    if x.is_cuda:
        from fedpara.engines.batched.kernels import norm_triton as kernels

        images = x.movedim(2, -1), dy.movedim(2, -1)
        dx, parts = kernels.backward(*images, weight, bias, stats, groups, pool)
        return dx.movedim(-1, 2), parts
    hat = _hat(x, stats)
    z = _affine(hat, weight, bias).to(x.dtype)
    dz = dy.to(hat.dtype)
    if pool:
        places = max_pool2d(z.flatten(0, 1), 2, return_indices=True)[1]
        dz = max_unpool2d(dz.flatten(0, 1), places, [2, 2], output_size=x.shape[3:]).view(x.shape)
    dz = dz * (z > 0)
    parts = torch.stack([(dz * hat).sum((3, 4)), dz.sum((3, 4))], 2)
    g = dz * weight.to(hat.dtype)[:, None, :, None, None]
    g, each = (t.unflatten(2, (groups, -1)) for t in (g, hat))
    means = (t.mean((3, 4, 5), keepdim=True) for t in (g, g * each))
    dx = (g - next(means) - each * next(means)) * stats[:, :, 1, :, None, None, None]
    return channels_last(dx.flatten(2, 3).to(x.dtype)), parts


class _Derivative(_SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, below: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool
    ) -> tuple[Tensor, Tensor]:
        y, stats = below(x, weight, bias, groups, eps, pool)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.mark_non_differentiable(stats)
        ctx.constants = groups, pool
        return y, stats

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats = ctx.saved_tensors
        dx, parts = OPS.lanes_norm_relu_backward(
            x, channels_last(grads[0]), weight, bias, stats, *ctx.constants
        )
        dw, db = parts.sum(-3).to(weight.dtype).unbind(-2)
        return None, dx, dw, db, None, None, None


def _lanes_forward(
    info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Tensor, *constants: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    return _in_lanes("lanes_norm_relu", 1, info, dims, (x, weight, bias), constants)


def _lanes_backward(
    info: Any, dims: Dims, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, *constants: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    return _in_lanes("lanes_norm_relu_backward", 2, info, dims, (x, dy, weight, bias, stats), constants)


def _in_lanes(
    name: str, images: int, info: Any, dims: Dims, tensors: tuple[Tensor, ...], constants: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """Calls the op with vmap's dimension as lanes. The first `images` tensors are images."""
    size, more = info.batch_size, tensors[0].dim() - (dims[0] is not None) == 5
    given = [into_lanes(t, dim, size, more) for t, dim in zip(tensors, dims, strict=False)]
    ready = [channels_last(t) for t in given[:images]] + [t.contiguous() for t in given[images:]]
    return tuple(out_of_lanes(t, size, more) for t in getattr(OPS, name)(*ready, *constants)), (0, 0)


def _empty(x: Tensor, pool: bool) -> Tensor:
    high, wide = (size // 2 if pool else size for size in x.shape[-2:])
    return x.new_empty((*x.shape[:-3], high, wide, x.shape[-3])).movedim(-1, -3)


def _sums(x: Tensor, count: int) -> Tensor:
    return x.new_empty((*x.shape[:-3], 2, count), dtype=torch.promote_types(x.dtype, torch.float32))


register(
    "lanes_norm_relu",
    "(Tensor x, Tensor weight, Tensor bias, int groups, float eps, bool pool) -> (Tensor, Tensor)",
    _forward,
    lambda x, weight, bias, groups, eps, pool: (_empty(x, pool), _sums(x, groups)),
    _lanes_forward,
)
register(
    "lanes_norm_relu_backward",
    "(Tensor x, Tensor dy, Tensor weight, Tensor bias, Tensor stats, int groups, bool pool) -> (Tensor, Tensor)",
    _backward,
    lambda x, dy, weight, bias, stats, groups, pool: (_empty(x, False), _sums(x, x.shape[-3])),
    _lanes_backward,
)
differentiate("lanes_norm_relu", _Derivative)
