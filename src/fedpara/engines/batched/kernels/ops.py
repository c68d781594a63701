"""Registers ops over stacked clients with torch, for `vmap`, `grad` and `torch.compile`.

An op takes and returns tensors with a dimension of lanes. Under `vmap` the mapped dimension becomes more lanes.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library, register_fake, register_vmap

LIBRARY = Library("fedpara", "DEF")
OPS: Any = torch.ops.fedpara

Dims = tuple[int | None, ...]

SHARED_MEMORY = 220_000
"""Bytes a block must be able to allocate: H100, H200 and B200 have 227 kB, desktop cards 99."""


def register(
    name: str,
    schema: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    mapped: Callable[..., tuple[Any, Any]],
) -> None:
    """`run` is the op, `shape` returns empty outputs, `mapped` is the `vmap` rule."""
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"fedpara::{name}", shape, lib=LIBRARY)
    register_vmap(f"fedpara::{name}", mapped, lib=LIBRARY)


def differentiate(name: str, derivative: type[_SingleLevelFunction]) -> None:
    """Adds one level of `grad`: `torch.library.register_autograd` does not work under `torch.func` transforms.

    `derivative.forward(ctx, below, *inputs)` calls `below` for the op itself.
    """

    def run(keys: Any, *inputs: Any) -> Any:
        def below(*inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                op = getattr(OPS, name).default
                return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

        with enable_single_level_autograd_function():
            return derivative.apply(below, *inputs)  # type: ignore[attr-defined]

    LIBRARY.impl(name, run, "Autograd", with_keyset=True)


def pays_on(device: torch.device) -> bool:
    """Whether the device supports these kernels: they need Hopper's copy engine and shared memory, and Triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    has = torch.cuda.get_device_properties(device)
    room = has.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return bool(has.major >= 9 and room >= SHARED_MEMORY)


def computed_in(input: Tensor) -> torch.dtype:
    """The type of a layer's products: autocast's, if enabled. Autocast leaves float64 as it is."""
    kind = input.device.type
    narrows = torch.is_autocast_enabled(kind) and input.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrows else input.dtype


def fold(tensor: Tensor, dim: int | None, size: int, at: int = 0) -> Tensor:
    """Merges the mapped dimension into the lanes (dimension `at`); an unmapped tensor is repeated."""
    tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.movedim(0, at).flatten(at, at + 1).contiguous()


def unfold(tensor: Tensor, size: int, at: int = 0) -> Tensor:
    """The inverse of `fold`; the mapped dimension is `at`."""
    return tensor.unflatten(at, (size, -1))  # type: ignore[no-any-return]


def into_lanes(tensor: Tensor, dim: int | None, size: int, more: bool) -> Tensor:
    """Makes vmap's dimension the lane dimension, or merges it into the existing one if `more`.

    An unmapped tensor is expanded.
    """
    if dim is None:
        tensor = tensor.expand(size, *tensor.shape)
    elif dim:
        tensor = tensor.movedim(dim, 0)
    return tensor.flatten(0, 1) if more else tensor


def out_of_lanes(tensor: Tensor, size: int, more: bool) -> Tensor:
    """The inverse of `into_lanes`; the mapped dimension is the first."""
    return tensor.unflatten(0, (size, -1)) if more else tensor
