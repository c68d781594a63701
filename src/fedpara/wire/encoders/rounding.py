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
    """Whether the cast gives no NaN and no infinity. Casting the extremes is enough, and needs no temporary tensor."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).to(narrow).isfinite().all())


def _round_at_random(floats: State, generator: torch.Generator) -> tuple[State, dict[str, float]]:
    if not floats:
        return {}, {}
    ordered = sorted(floats)
    largest = dict(zip(ordered, _magnitudes([floats[name] for name in ordered]), strict=True))
    for name, value in largest.items():
        if not value <= _LARGEST:
            raise UpdateRejected(_does_not_fit(name, floats[name], "int8", _LARGEST))
    # At least the smallest normal number, so that zero and subnormal tensors need no special case.
    tiny = torch.finfo(torch.float32).tiny
    scales = {name: max(value / _LEVELS, tiny) for name, value in largest.items()}
    count = sum(tensor.numel() for tensor in floats.values())
    drawn = cut(uniform(count, generator, device_of([floats])), floats, ordered)
    levels: State = {}
    for names in by_type(floats):
        wide = torch.float64 if floats[names[0]].dtype == torch.float64 else torch.float32
        whole = flat(floats, names).to(wide, copy=True)
        parts = cut(whole, floats, names)
        torch._foreach_div_([parts[name] for name in names], [scales[name] for name in names])
        rounded = flat(drawn, names).add_(whole).floor_()
        # In float32, max|x| / s may be slightly above 127.
        levels |= cut(rounded.clamp_(-_LEVELS, _LEVELS).to(torch.int8), floats, names)
    return levels, scales


def _magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """The largest |x| of each tensor, NaN if it holds one, 0 if it is empty. Waits for the device once."""
    full = [tensor for tensor in tensors if tensor.numel()]
    found = torch._foreach_max(torch._foreach_abs(full)) if full else ()
    values = iter(torch.stack([one.double() for one in found]).tolist() if full else ())
    return [next(values) if tensor.numel() else 0.0 for tensor in tensors]


def _does_not_fit(name: str, tensor: Tensor, precision: str, largest: float) -> str:
    low, high = (float(end) for end in torch.aminmax(tensor))
    return (
        f"tensor {name!r} spans {low:.4g} to {high:.4g}: expected finite values within ±{largest:.4g} "
        f"to be sent as {precision}. Clip the update, or use a wider link."
    )
