"""The local optimizers' steps in place, on lists of tensors: a few calls of torch per step, not a few per tensor.

Operation by operation the formulas of `optimizers.py`, so that on a CPU they give the same bits.
"""

import torch
from torch import Tensor

from fedpara.state import State

Slots = dict[str, State]
Rate = float | Tensor


def sgd_in_place(y: State, g: State, slots: Slots, lr: Rate, *, momentum: float, weight_decay: float) -> None:
    tensors, gradients = list(y.values()), [g[name] for name in y]
    if weight_decay:
        gradients = list(torch._foreach_add(gradients, tensors, alpha=weight_decay))
    if momentum:
        v = [slots["velocity"][name] for name in y]
        torch._foreach_mul_(v, momentum)
        torch._foreach_add_(v, gradients)
        gradients = v
    _descend(tensors, gradients, lr)


def adam_in_place(
    y: State,
    g: State,
    slots: Slots,
    lr: Rate,
    *,
    betas: tuple[float, float],
    eps: float,
    l2: float = 0.0,
    decay: float = 0.0,
) -> None:
    (b1, b2), k = betas, slots["count"]["k"].add_(1)
    correction_1, correction_2 = 1 - b1**k, (1 - b2**k).sqrt()
    for names in _by_type(y):
        tensors, gradients = [y[name] for name in names], [g[name] for name in names]
        m, v = ([slots[slot][name] for name in names] for slot in ("m", "v"))
        if l2:
            gradients = list(torch._foreach_add(gradients, tensors, alpha=l2))
        torch._foreach_mul_(m, b1)
        torch._foreach_add_(m, torch._foreach_mul(gradients, 1 - b1))
        squares = torch._foreach_mul(gradients, 1 - b2)
        torch._foreach_mul_(squares, gradients)
        torch._foreach_mul_(v, b2)
        torch._foreach_add_(v, squares)
        c1, c2 = (c.to(tensors[0].dtype) for c in (correction_1, correction_2))
        direction, root = list(torch._foreach_div(m, c1)), torch._foreach_sqrt(v)
        torch._foreach_div_(root, c2)
        torch._foreach_add_(root, eps)
        torch._foreach_div_(direction, root)
        if decay:
            torch._foreach_add_(direction, torch._foreach_mul(tensors, decay))
        _descend(tensors, direction, lr)


def _descend(tensors: list[Tensor], direction: list[Tensor], lr: Rate) -> None:
    """tensors -= lr direction. A captured step reads lr from a tensor, because a number would stay in the graph."""
    if not isinstance(lr, Tensor):
        torch._foreach_add_(tensors, direction, alpha=-lr)
    elif lr.is_cuda:  # addcmul with a single number would be one launch per tensor
        torch._foreach_sub_(tensors, torch._foreach_mul(direction, lr))
    else:
        torch._foreach_addcmul_(tensors, direction, [lr.to(t.dtype) for t in tensors], value=-1)


def _by_type(y: State) -> list[list[str]]:
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in y.items():
        names.setdefault(tensor.dtype, []).append(name)
    return list(names.values())
