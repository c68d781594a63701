"""Inner weights from factors, and the nonlinearity s that a scheme applies to them.

matrix    X Y^T              Prop. 1
kernel    T x_1 X x_2 Y      Prop. 3
s         identity or tanh   appendix B
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import pad

Nonlinearity = Callable[[Tensor], Tensor]

SATURATION = 0.96
"""The largest |tanh| that a fit starts from."""


def identity(w: Tensor) -> Tensor:
    return w


def atanh(w: Tensor) -> Tensor:
    """The inverse of tanh, finite for every w."""
    return w.clamp(-SATURATION, SATURATION).atanh()


NONLINEARITIES: dict[str | None, Nonlinearity] = {None: identity, "tanh": torch.tanh}
INVERSES: dict[str | None, Nonlinearity] = {None: identity, "tanh": atanh}


def matrix(x: Tensor, y: Tensor) -> Tensor:
    """W[m, n] = X[m, r] Y[n, r]^T"""
    return x @ y.mT


def truncated(w: Tensor, r: int) -> list[Tensor]:
    """The X and Y of rank r with X Y^T nearest to the matrix w: its truncated SVD, padded with zeros."""
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    root = s[:r].sqrt()
    return [wide(u[:, :r] * root, r), wide(vh[:r].mT * root, r)]


def wide(x: Tensor, r: int) -> Tensor:
    """x with zero columns up to r."""
    return pad(x, (0, r - x.shape[1])).contiguous()


def kernels(parts: Sequence[Sequence[Tensor]], channels_last: bool = False) -> list[Tensor]:
    """W[o, i, k...] = sum_ab X[o, a] T[a, b, k...] Y[i, b] for each (X, Y, T), all of the same shapes.

    Contiguous by default, like a dense kernel: a convolution's output then still supports `.view`.
    Channels-last needs no copy after the products, and GPU convolutions prefer it.
    """
    if not channels_last:
        return [_contiguous(x, y, t) for x, y, t in parts]
    if parts[0][0].is_cuda:
        return stacked_parts(parts)
    return [_channels_last(x, y, t) for x, y, t in parts]


def stacked_parts(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """All kernels as one batch, channels-last."""
    if len(parts) == 1:
        # Not stacked: torch's compiler gives the gradient of a stack of one tensor other strides than it had.
        (one,) = ([factor[None] for factor in factors] for factors in parts)
        return [_channels_last_batched(*one).squeeze(0).movedim(-1, 1)]
    x, y, t = (torch.stack(list(same)) for same in zip(*parts, strict=True))
    # Unbound before their axes move, so that autograd stacks gradients in the order that the products read.
    return [w.movedim(-1, 1) for w in _channels_last_batched(x, y, t).unbind()]


def _contiguous(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """W = X Z with Z = T x_2 Y. The small product comes first, so the large one is a single GEMM."""
    r = t.shape[0]
    z = (y @ t.reshape(r, r, -1)).reshape(r, -1)
    return (x @ z).reshape(x.shape[0], y.shape[0], *t.shape[2:])


def _channels_last(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """The same with the core's second index last, so no product needs rearranging."""
    r = t.shape[0]
    z = t.flatten(2).transpose(1, 2).reshape(-1, r) @ y.mT
    return (x @ z.reshape(r, -1)).reshape(x.shape[0], *t.shape[2:], y.shape[0]).movedim(-1, 1)


def stacked_kernels(x: Tensor, y: Tensor, t: Tensor, channels_last: bool) -> Tensor:
    """The kernels of stacked factors as [inner weight, o, i, k...], or [inner weight, o, k..., i] if channels-last."""
    return _channels_last_batched(x, y, t) if channels_last else vmap(_contiguous)(x, y, t)


def _channels_last_batched(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """All inner weights of a layer in two batched GEMMs, with the rank padded to a multiple of 8 for tensor cores."""
    spare = -t.shape[1] % 8
    inner = core_rows(x, t, spare) @ pad(y, (0, spare)).mT
    return inner.reshape(*x.shape[:2], *t.shape[3:], y.shape[1])


def core_rows(x: Tensor, t: Tensor, spare: int) -> Tensor:
    """A[.., (o, k), b] = sum_a X[.., o, a] T[.., a, b, k], with `spare` more columns of zeros; then W = A Y^T."""
    core = pad(t.flatten(3).transpose(2, 3), (0, spare, 0, 0, 0, spare))
    return (pad(x, (0, spare)) @ core.flatten(2)).reshape(len(x), -1, core.shape[3])
