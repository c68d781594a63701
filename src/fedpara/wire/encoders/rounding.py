"""float32, float16, bfloat16 and int8: each tensor stays one wire tensor under its own name.

float32    unchanged: float32 and float64 exactly, narrower floats widened to float32
float16    the nearest float16
bfloat16   the nearest bfloat16
int8       q = floor(x / s + u), u ~ U[0, 1), s = max|x| / 127 per tensor: E[s q] = x, |s q - x| <= s

All tensors of a type are rounded together: a hundred small tensors joined are rounded as fast as one large one.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedpara.errors import ConfigError, UpdateRejected, UsageError
from fedpara.layout import by_type, cut, flat
from fedpara.state import State, device_of
from fedpara.wire.encoders.draws import uniform

PRECISIONS = ("float32", "float16", "bfloat16", "int8")

_LEVELS = 127
# Slightly below the largest float32: 127 s must not round to infinity.
_LARGEST = 3.4e38
_CAST = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def quantize(
    state: State, precision: str, generator: torch.Generator | None = None
) -> tuple[State, dict[str, float]]:
    """(the tensors as they are sent, the scale s of those that are scaled). Draws in the order of the names."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}: expected one of {', '.join(PRECISIONS)}.")
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    if precision == "float32":
        kept = (torch.float32, torch.float64)
        return state | {name: t.float() for name, t in floats.items() if t.dtype not in kept}, {}
    if precision in _CAST:
        return state | _cast(floats, precision), {}
    if not floats:
        return state, {}
    if generator is None:
        raise UsageError("int8 rounds at random: pass a torch.Generator as generator=...")
    levels, scales = _round_at_random(floats, generator)
    return state | levels, scales


def dequantize(state: State, scales: Mapping[str, float]) -> State:
    """The tensors in float32. float64 stays, and so do integers that were not scaled: their scale is 0 or missing."""
    exact = (torch.float32, torch.float64)
    narrow = {
        name: tensor
        for name, tensor in state.items()
        if scales.get(name) or (tensor.is_floating_point() and tensor.dtype not in exact)
    }
    wide = dict(state)
    for names in by_type(narrow):
        made = cut(flat(narrow, names).float(), narrow, names)
        if scaled := [name for name in names if scales.get(name)]:
            torch._foreach_mul_([made[name] for name in scaled], [scales[name] for name in scaled])
        wide |= made
    return wide


def _cast(floats: State, precision: str) -> State:
    narrow = _CAST[precision]
    made: State = {}
    for names in by_type(floats):
        whole = flat(floats, names)
        if not _fits(whole, narrow):
            bad = next(name for name in floats if not _fits(floats[name], narrow))
            raise UpdateRejected(_does_not_fit(bad, floats[bad], precision, torch.finfo(narrow).max))
        made |= cut(whole.to(narrow), floats, names)
    return made


def _fits(tensor: Tensor, narrow: torch.dtype) -> bool:
    """Whether the cast gives finite numbers only. Casting the extremes is enough, and needs no temporary tensor."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).to(narrow).isfinite().all())


def _round_at_random(floats: State, generator: torch.Generator) -> tuple[State, dict[str, float]]:
    ordered = sorted(floats)
    count = sum(tensor.numel() for tensor in floats.values())
    drawn = uniform(count, generator, device_of([floats])).split([floats[name].numel() for name in ordered])
    of_name = dict(zip(ordered, drawn, strict=True))
    levels: State = {}
    scales: dict[str, float] = {}
    for names in by_type(floats):
        whole = flat(floats, names)
        wide = whole.abs() if whole.dtype == torch.float64 else whole.float().abs()
        parts = wide.split([floats[name].numel() for name in names])
        largest = _maxima(parts)
        for name, value in zip(names, largest, strict=True):
            if not value <= _LARGEST:
                raise UpdateRejected(_does_not_fit(name, floats[name], "int8", _LARGEST))
        # At least the smallest normal number: this also covers zero and subnormal tensors.
        steps = [max(value / _LEVELS, torch.finfo(torch.float32).tiny) for value in largest]
        scales |= zip(names, steps, strict=True)
        wide.copy_(whole)  # in the memory of |x|: fresh memory takes longer than the copy
        torch._foreach_div_(parts, steps)
        rounded = flat(of_name, names).add_(wide).floor_()
        # In float32, max|x| / s may be slightly above 127.
        levels |= cut(rounded.clamp_(-_LEVELS, _LEVELS).to(torch.int8), floats, names)
    return levels, scales


def _maxima(tensors: Sequence[Tensor]) -> list[float]:
    """The largest number of each tensor, NaN if it holds one, 0 if it is empty. Waits for the device once."""
    full = [tensor for tensor in tensors if tensor.numel()]
    values = iter(torch.stack(torch._foreach_max(full)).tolist() if full else ())
    return [next(values) if tensor.numel() else 0.0 for tensor in tensors]


def _does_not_fit(name: str, tensor: Tensor, precision: str, largest: float) -> str:
    low, high = (float(end) for end in torch.aminmax(tensor))
    return (
        f"tensor {name!r} spans {low:.4g} to {high:.4g}: expected finite values within ±{largest:.4g} "
        f"to be sent as {precision}. Clip the update, or use a wider link."
    )
