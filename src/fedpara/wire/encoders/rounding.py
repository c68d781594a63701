"""float32, float16, bfloat16 and int8: each tensor stays one wire tensor under its own name.

float32    unchanged: float32 and float64 exactly, narrower floats widened to float32
float16    the nearest float16
bfloat16   the nearest bfloat16
int8       q = floor(x / s + u), u ~ U[0, 1), s = max|x| / 127 per tensor: E[s q] = x, |s q - x| <= s
"""

import math

import torch
from torch import Tensor

from fedpara.errors import ConfigError, UpdateRejected, UsageError

PRECISIONS = ("float32", "float16", "bfloat16", "int8")

_LEVELS = 127
# Slightly below the largest float32: 127 s must not round to infinity.
_LARGEST = 3.4e38
_CAST = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def quantize(
    name: str, tensor: Tensor, precision: str, generator: torch.Generator | None = None
) -> tuple[Tensor, float]:
    """The tensor as it is sent, and its scale s (0 if it is not scaled)."""
    if tensor.dtype == torch.float32 and precision == "float32":
        return tensor, 0.0
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}: expected one of {', '.join(PRECISIONS)}.")
    if not tensor.is_floating_point():
        return tensor, 0.0
    if precision == "float32":
        return (tensor if tensor.dtype == torch.float64 else tensor.float()), 0.0
    if precision in _CAST:
        narrow = _CAST[precision]
        if not _fits(tensor, narrow):
            raise UpdateRejected(_does_not_fit(name, tensor, precision, torch.finfo(narrow).max))
        return tensor.to(narrow), 0.0
    if generator is None:
        raise UsageError("int8 rounds at random: pass a torch.Generator as generator=...")
    return _round_at_random(name, tensor, generator)


def dequantize(tensor: Tensor, scale: float) -> Tensor:
    """The tensor in float32. float64 stays, and so do integers that were not scaled."""
    if tensor.dtype == torch.float32:
        return tensor
    if scale:
        return tensor.float().mul_(scale)
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.float()
    return tensor


def _fits(tensor: Tensor, narrow: torch.dtype) -> bool:
    """Whether the cast gives no NaN and no infinity. Casting the extremes is enough, and needs no temporary tensor."""
    return not tensor.numel() or all(math.isfinite(end.to(narrow)) for end in torch.aminmax(tensor))


def _round_at_random(name: str, tensor: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:
    largest = max(abs(float(end)) for end in torch.aminmax(tensor)) if tensor.numel() else 0.0
    if not largest <= _LARGEST:
        raise UpdateRejected(_does_not_fit(name, tensor, "int8", _LARGEST))
    # At least the smallest normal number, so that zero and subnormal tensors need no special case.
    scale = max(largest / _LEVELS, torch.finfo(torch.float32).tiny)
    uniform = torch.rand(tensor.shape, generator=generator, device=generator.device).to(tensor.device)
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    levels = uniform.add_(wide / scale).floor_()
    # In float32, max|x| / s may be slightly above 127.
    return levels.clamp_(-_LEVELS, _LEVELS).to(torch.int8), scale


def _does_not_fit(name: str, tensor: Tensor, precision: str, largest: float) -> str:
    low, high = (float(end) for end in torch.aminmax(tensor))
    return (
        f"tensor {name!r} spans {low:.4g} to {high:.4g}: expected finite values within ±{largest:.4g} "
        f"to be sent as {precision}. Clip the update, or use a wider link."
    )
