"""How factors become a weight. Forward, merge, Jacobian correction, fitting and export all call these.

matrix    X Y^T                                      Prop. 1, each inner weight
kernel    T x_1 X x_2 Y                              Prop. 3, each inner weight
fedpara   s(W1) * s(W2)                              s: identity or tanh (appendix B)
pfedpara  s(W1) * (s(W2) + 1)                        section 2.3
"""

from collections.abc import Callable

import torch
from torch import Tensor

Nonlinearity = Callable[[Tensor], Tensor]


def identity(w: Tensor) -> Tensor:
    return w


NONLINEARITIES: dict[str | None, Nonlinearity] = {None: identity, "tanh": torch.tanh}


def matrix(x: Tensor, y: Tensor) -> Tensor:
    """W[m, n] = X[m, r] Y[n, r]^T"""
    return x @ y.mT


def kernel(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """W[o, i, k...] = sum_a X[o, a] Z[a, i, k...],  Z[a, i, k...] = sum_b Y[i, b] T[a, b, k...]

    The small product first, so that the large one is a single GEMM whose result is already the kernel.
    On the GPU Z is laid out [a, k, i] and the kernel comes out channels-last, which its convolutions want;
    on the CPU that order would cost a copy in every convolution, and GroupNorm under vmap refuses it.
    """
    r, k = t.shape[0], t.shape[2:]
    core = t.reshape(r, r, -1)
    if t.is_cuda:
        z = (core.mT @ y.mT).reshape(r, -1)
        return (x @ z).reshape(x.shape[0], *k, y.shape[0]).movedim(-1, 1)
    z = (y @ core).reshape(r, -1)
    return (x @ z).reshape(x.shape[0], y.shape[0], *k)


def fedpara(w1: Tensor, w2: Tensor, s: Nonlinearity = identity) -> Tensor:
    return s(w1) * s(w2)


def pfedpara(w1: Tensor, w2: Tensor, s: Nonlinearity = identity) -> Tensor:
    return s(w1) * (s(w2) + 1)
