"""A second device without a GPU: tensors that say they are on "cuda", and refuse to meet those that are not.

Inside `SecondDevice()`, `.to("cuda")` gives such a tensor, every result computed from one is one, and an operation on
tensors of both devices raises, as it would on a GPU. The numbers are computed on the CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
MAY_MIX = ("copy_", "_foreach_copy_", "__get__", "same_storage", "to", "cpu")


class Elsewhere(Tensor):
    """A tensor on the second device."""


class SecondDevice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        there = any(isinstance(one, Elsewhere) for one in given)
        if there and func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA
        if there and func in (Tensor.is_cuda.__get__, Tensor.is_cpu.__get__):  # type: ignore[attr-defined]
            return func == Tensor.is_cuda.__get__  # type: ignore[attr-defined]
        if there and name == "numpy":
            raise TypeError("can't convert a tensor of the second device to numpy.")
        here = [one for one in given if not isinstance(one, Elsewhere) and one.dim()]
        if there and here and name not in MAY_MIX:
            raise RuntimeError(f"{name} mixes tensors of two devices.")
        to = kwargs.pop("device", None)
        if to is None and name == "to":
            like = next((one for one in args[1:] if isinstance(one, Tensor)), None)
            to = next((one for one in args[1:] if isinstance(one, torch.device | str)), None)
            if like is not None:
                to, args = CUDA if isinstance(like, Elsewhere) else torch.device("cpu"), (args[0], like.dtype)
        if name == "cpu":
            to = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("to", "cpu") and to is not None:
                made = args[0].as_subclass(Tensor).clone()
                dtype = next(
                    (one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)), made.dtype
                )
                made = made.to(dtype)
            else:
                made = func(*args, **kwargs)
            lands = there if to is None else torch.device(to).type == "cuda"

            def placed(one: Any) -> Any:
                if not isinstance(one, Tensor) or any(one is known for known in given):
                    return one
                return one.as_subclass(Elsewhere if lands else Tensor)

            return (
                tree_map(placed, made)
                if isinstance(made, Tensor | list | tuple) and not isinstance(made, torch.Size)
                else made
            )
