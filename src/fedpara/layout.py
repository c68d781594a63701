"""The memory layout of a state: a hundred small tensors side by side are read, added and copied as fast as one.

    runs      joins neighbouring tensors to a few flat ones
    flat      joins the named tensors to one;   cut   the inverse, as views
    by_type   groups the names of tensors that `flat` can join
    joined    joins the tensors of each type to one;   separated   the inverse, as views
    together  computes a function of every number on joined tensors

Unlike the functions of `state.py`, these return views where they can: do not write to the results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor


def runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in the same order, in as few flat tensors as possible.

    Neighbours in memory become one tensor, without a copy. Only tensors that are not contiguous are copied.
    """
    started: list[tuple[Tensor, int]] = []  # the first tensor of each run, and the run's length in numbers
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
            or not (its is base is not None or _same_storage(started[-1][0], tensor))
        ):
            started.append((tensor, 0))
            base, dtype, width = its, tensor.dtype, tensor.element_size()
        started[-1] = started[-1][0], started[-1][1] + size
        end = start + size * width
    return [first.as_strided((count,), (1,)) for first, count in started]


def flat(a: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """The named tensors as one flat tensor, copied only if they are not neighbours in this order.

    Expects at least one name, and tensors of one type.
    """
    found = runs([a[name] for name in names]) or [a[name].reshape(-1) for name in names][:1]
    return found[0] if len(found) == 1 else torch.cat(found)


def cut(whole: Tensor, like: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The inverse of `flat`: views of the last dimension, shaped like the named tensors. Leading dimensions stay."""
    names, before = list(names), whole.shape[:-1]
    tensors = [like[name] for name in names]
    if not before and all(map(Tensor.numel, tensors)) and whole.device == tensors[0].device:
        return dict(zip(names, torch._utils._unflatten_dense_tensors(whole, tensors), strict=True))
    shapes = [tensor.shape for tensor in tensors]
    parts = whole.split([shape.numel() for shape in shapes], dim=-1)
    return {
        name: part.view((*before, *shape)) for name, part, shape in zip(names, parts, shapes, strict=True)
    }


def by_type(a: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of each type, sorted as in a message: tensors cut from their `flat` are in the order of a message."""
    names: dict[torch.dtype, list[str]] = {}
    for name in sorted(a):
        names.setdefault(a[name].dtype, []).append(name)
    return list(names.values())


def joined(a: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{type: the tensors of that type as one flat tensor, in the order of their names}"""
    return {str(a[names[0]].dtype): flat(a, names) for names in by_type(a)}


def separated(blocks: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `joined`: views, named and shaped like the tensors of `like`."""
    found: dict[str, Tensor] = {}
    for names in by_type(like):
        found |= cut(blocks[str(like[names[0]].dtype)], like, names)
    return {name: found[name] for name in like}


def together(f: Callable[..., Tensor], *states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{name: f(a[name], b[name], ...)} for the names of the first state. `f` treats every number alike."""
    first = states[0]
    groups: dict[tuple[torch.dtype, ...], list[str]] = {}
    for name in sorted(first):
        groups.setdefault(tuple(state[name].dtype for state in states), []).append(name)
    made: dict[str, Tensor] = {}
    for names in groups.values():
        made |= cut(f(*(flat(state, names) for state in states)), first, names)
    return {name: made[name] for name in first}


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
