"""GroupNorm, ReLU and pooling of stacked clients as one op.

    y = max(GroupNorm(x + offset), 0), or its maximum over squares of 2 x 2 pixels

`LanesSequential` uses it where a `Sequential` has these layers in a row: nothing else can see what is between them.
The offset is the bias of a convolution before them: here it costs nothing, and its gradient needs no pass over dx.
On a GPU in 16 bits it is a kernel in each direction: `gpu/norm_once.py` for small images, `gpu/norm_streamed.py` for
others. Images are as in `conv.py`. It can be differentiated once.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.functional import max_pool2d, max_unpool2d, relu

from fedpara.engines.batched.kernels.conv import channels_last
from fedpara.engines.batched.kernels.ops import (
    OPS,
    Dims,
    computed_in,
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
        layers = list(self)
        while layers:
            row, layers = layers[: (count := fused(layers))], layers[count:]
            input = _as_one(row, input) if count > 1 else row[0](input)
        return input


def _as_one(row: list[nn.Module], input: Tensor) -> Tensor:
    """The layers of a row that `fused` found."""
    conv = row[0] if isinstance(row[0], nn.Conv2d) else None
    norm, last = row[0 if conv is None else 1], row[-1]
    assert isinstance(norm, nn.GroupNorm)
    if not fits(norm, input, input.dtype if conv is None else computed_in(input)):
        for layer in row:
            input = layer(input)
        return input
    x, offset = input, None
    if conv is not None:
        x, offset = conv._conv_forward(input, conv.weight, None), conv.bias
    pool = halves(last) and x.shape[-1] % 2 == x.shape[-2] % 2 == 0
    constants = norm.num_groups, norm.eps, pool
    y = OPS.lanes_norm_relu(channels_last(x), offset, norm.weight, norm.bias, *constants)[0]
    made: Tensor = last(y) if halves(last) and not pool else y
    return made


def use_fused_norms(model: nn.Module) -> nn.Module:
    """Replaces every `Sequential` in place; parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.Sequential:
            module.__class__ = LanesSequential
    return model


def fused(layers: list[nn.Module]) -> int:
    """How many of the first layers one op computes: a norm, a ReLU, perhaps a convolution before, a pooling behind."""
    first = isinstance(layers[0], nn.Conv2d) and type(layers[0]).forward is nn.Conv2d.forward
    norm, relu, pool = [*layers[first : first + 3], *[None] * 3][:3]
    if not (isinstance(norm, nn.GroupNorm) and type(relu) is nn.ReLU):
        return 1
    row = layers[: first + (3 if pool is not None and halves(pool) else 2)]
    # A hook sees what its layer returns.
    return 1 if any(layer._forward_hooks or layer._forward_pre_hooks for layer in row) else len(row)


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


def fits(norm: nn.GroupNorm, input: Tensor, dtype: torch.dtype) -> bool:
    """Whether the norm reads a 16-bit image on a GPU, and its groups fit in a program."""
    if not (norm.affine and input.dim() == 4 and input.is_cuda and dtype.itemsize == 2):
        return False
    c, (h, w) = norm.num_channels, input.shape[2:]
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
    x: Tensor, offset: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, pool: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [l, b, c, h, w], the others [l, c], to y [l, b, c, h, w], half as high and wide if pooled, stats and totals

    stats [l, b, 2, g] are the groups' means and 1 / deviations, totals [l, b, c] the channels' sums of x.
    """
    if x.dim() == 4:
        more = None if offset is None else offset[None]
        y, stats, totals = _forward(x[None], more, weight[None], bias[None], groups, eps, pool)
        return y[0], stats[0], totals[0]
    if x.is_cuda:
        kernels = _kernels(x.movedim(2, -1), groups, pool)
        images, *sums = kernels.forward(x.movedim(2, -1), offset, weight, bias, groups, eps, pool)
        return images.movedim(-1, 2), sums[0], sums[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(_moved(wide, offset).unflatten(2, (groups, -1)), (3, 4, 5), correction=0)
    stats = torch.stack([mean, (variance + eps).rsqrt()], 2)
    y = relu(_affine(_hat(x, offset, stats), weight, bias).to(x.dtype))
    y = max_pool2d(y.flatten(0, 1), 2).unflatten(0, x.shape[:2]) if pool else y
    return channels_last(y), stats, wide.sum((3, 4))


class _Kernels(Protocol):
    def forward(
        self,
        x: Tensor,
        offset: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
        pool: bool,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def backward(
        self,
        x: Tensor,
        dy: Tensor,
        offset: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        stats: Tensor,
        totals: Tensor,
        groups: int,
        pool: bool,
    ) -> tuple[Tensor, Tensor]: ...


def _kernels(x: Tensor, groups: int, pool: bool) -> _Kernels:
    from fedpara.engines.batched.kernels.gpu import norm_once, norm_streamed

    return norm_once if norm_once.fits(x, groups, pool) else norm_streamed


def _moved(x: Tensor, offset: Tensor | None) -> Tensor:
    """x + offset"""
    return x if offset is None else x + offset.to(x.dtype)[:, None, :, None, None]


def _hat(x: Tensor, offset: Tensor | None, stats: Tensor) -> Tensor:
    """(x + offset - mean) / deviation"""
    mean, scale = (t[..., None, None, None] for t in stats.unbind(2))
    grouped: Tensor = _moved(x.to(stats.dtype), offset).unflatten(2, (stats.shape[-1], -1))
    return ((grouped - mean) * scale).flatten(2, 3)


def _affine(hat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    w, b = (t.to(hat.dtype)[:, None, :, None, None] for t in (weight, bias))
    return hat * w + b


def _backward(
    x: Tensor,
    dy: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    stats: Tensor,
    totals: Tensor,
    groups: int,
    pool: bool,
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight, bias and offset, [l, 3, c]

    dz = dy where it is the maximum and above 0,   dweight = sum of dz hat,   dbias = sum of dz,   g = dz weight
    dx = (g - mean of g - hat (mean of g hat)) / deviation      hat: x with mean 0 and deviation 1, means over groups
    doffset = sum of dx
    """
    if x.dim() == 4:
        more = None if offset is None else offset[None]
        given = x[None], dy[None], more, weight[None], bias[None], stats[None], totals[None]
        dx, sums = _backward(*given, groups, pool)
        return dx[0], sums[0]
    if x.is_cuda:
        images = x.movedim(2, -1), dy.movedim(2, -1)
        kernels = _kernels(images[0], groups, pool)
        dx, sums = kernels.backward(*images, offset, weight, bias, stats, totals, groups, pool)
        return dx.movedim(-1, 2), sums
    hat = _hat(x, offset, stats)
    z = _affine(hat, weight, bias).to(x.dtype)
    dz = dy.to(hat.dtype)
    if pool:
        places = max_pool2d(z.flatten(0, 1), 2, return_indices=True)[1]
        dz = max_unpool2d(dz.flatten(0, 1), places, [2, 2], output_size=x.shape[3:]).view(x.shape)
    dz = dz * (z > 0)
    dweight, dbias = (dz * hat).sum((1, 3, 4)), dz.sum((1, 3, 4))
    g = dz * weight.to(hat.dtype)[:, None, :, None, None]
    g, each = (t.unflatten(2, (groups, -1)) for t in (g, hat))
    means = (t.mean((3, 4, 5), keepdim=True) for t in (g, g * each))
    dx = ((g - next(means) - each * next(means)) * stats[:, :, 1, :, None, None, None]).flatten(2, 3)
    return channels_last(dx.to(x.dtype)), torch.stack([dweight, dbias, dx.sum((1, 3, 4))], 1)


class _Derivative(_SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        below: Any,
        x: Tensor,
        offset: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
        pool: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, stats, totals = below(x, offset, weight, bias, groups, eps, pool)
        ctx.save_for_backward(x, offset, weight, bias, stats, totals)
        ctx.mark_non_differentiable(stats, totals)
        ctx.constants = groups, pool
        return y, stats, totals

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, offset, weight, *rest = ctx.saved_tensors
        dx, sums = OPS.lanes_norm_relu_backward(
            x, channels_last(grads[0]), offset, weight, *rest, *ctx.constants
        )
        dw, db, moved = sums.to(weight.dtype).unbind(-2)
        return None, dx, None if offset is None else moved.to(offset.dtype), dw, db, None, None, None


def _lanes_forward(
    info: Any,
    dims: Dims,
    x: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *constants: Any,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return _in_lanes("lanes_norm_relu", 1, info, dims, (x, offset, weight, bias), constants)


def _lanes_backward(
    info: Any,
    dims: Dims,
    x: Tensor,
    dy: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    stats: Tensor,
    totals: Tensor,
    *constants: Any,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    tensors = x, dy, offset, weight, bias, stats, totals
    return _in_lanes("lanes_norm_relu_backward", 2, info, dims, tensors, constants)


def _in_lanes(
    name: str, images: int, info: Any, dims: Dims, tensors: tuple[Tensor | None, ...], constants: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Calls the op with vmap's dimension as lanes. The first `images` tensors are images."""
    size, more = info.batch_size, tensors[0].dim() - (dims[0] is not None) == 5  # type: ignore[union-attr]
    ready: list[Tensor | None] = []
    for tensor, dim in zip(tensors, dims, strict=False):
        given = None if tensor is None else into_lanes(tensor, dim, size, more)
        order = channels_last if len(ready) < images else torch.Tensor.contiguous
        ready.append(None if given is None else order(given))
    made = tuple(out_of_lanes(t, size, more) for t in getattr(OPS, name)(*ready, *constants))
    return made, (0,) * len(made)


def _empty(x: Tensor, pool: bool) -> Tensor:
    high, wide = (size // 2 if pool else size for size in x.shape[-2:])
    return x.new_empty((*x.shape[:-3], high, wide, x.shape[-3])).movedim(-1, -3)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


register(
    "lanes_norm_relu",
    "(Tensor x, Tensor? offset, Tensor weight, Tensor bias, int groups, float eps, bool pool)"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    lambda x, offset, weight, bias, groups, eps, pool: (
        _empty(x, pool),
        x.new_empty((*x.shape[:-3], 2, groups), dtype=_wide(x)),
        x.new_empty(x.shape[:-2], dtype=_wide(x)),
    ),
    _lanes_forward,
)
register(
    "lanes_norm_relu_backward",
    "(Tensor x, Tensor dy, Tensor? offset, Tensor weight, Tensor bias, Tensor stats, Tensor totals, int groups,"
    " bool pool) -> (Tensor, Tensor)",
    _backward,
    lambda x, dy, offset, weight, bias, stats, totals, groups, pool: (
        _empty(x, False),
        x.new_empty((*x.shape[:-4], 3, x.shape[-3]), dtype=_wide(x)),
    ),
    _lanes_backward,
)
differentiate("lanes_norm_relu", _Derivative)
