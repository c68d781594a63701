"""How a state lies in memory. A hundred small tensors side by side are read, added and copied at the cost of one.

    runs      tensors as few flat ones, neighbours joined
    flat      named tensors as one;   cut   the inverse, views of it
    by_type   the names that can be one

Unlike the functions of `state.py` these give views where they can: nobody writes to what they return.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in the same order as few flat tensors: neighbours in memory are one, nothing is copied
    but what lies scattered. A state of a hundred small tensors is then read at the cost of one.
    """
    begun: list[tuple[Tensor, int]] = []  # the first tensor of each run, and how many numbers it holds
    end, width = 0, 1
    base: Tensor | None = None
    dtype: torch.dtype | None = None
    for tensor in tensors:
        size = tensor.numel()
        if not size:
            continue
        tensor = (tensor.detach() if tensor.requires_grad else tensor).contiguous()
        start, its = tensor.data_ptr(), tensor._base
        if (
            start != end
            or tensor.dtype != dtype
            or not (its is base is not None or _same_storage(begun[-1][0], tensor))
        ):
            begun.append((tensor, 0))
            base, dtype, width = its, tensor.dtype, tensor.element_size()
        begun[-1] = begun[-1][0], begun[-1][1] + size
        end = start + size * width
    return [first.as_strided((count,), (1,)) for first, count in begun]


def flat(a: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """The named tensors, all of one type and at least one of them, as one; not copied where they lie so already."""
    found = runs([a[name] for name in names]) or [a[name].reshape(-1) for name in names][:1]
    return found[0] if len(found) == 1 else torch.cat(found)


def cut(whole: Tensor, like: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The inverse of `flat`: views of the last dimension, shaped as those tensors; any dimension before stays."""
    names, before = list(names), whole.shape[:-1]
    shapes = [like[name].shape for name in names]
    parts = whole.split([shape.numel() for shape in shapes], dim=-1)
    return {
        name: part.view((*before, *shape)) for name, part, shape in zip(names, parts, shapes, strict=True)
    }


def by_type(a: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of each type, sorted as messages are: what is cut from a `flat` of them lies as it will be sent."""
    names: dict[torch.dtype, list[str]] = {}
    for name in sorted(a):
        names.setdefault(a[name].dtype, []).append(name)
    return list(names.values())


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
