"""The payload of a message whose link has an encoder.

The wire tensors of all encoded tensors are joined by part, in the order of the names, as `__codes__`, `__scales__` and
so on; float tensors that are not encoded are joined as `__plain__`. Neither names nor shapes travel: both ends know
them from the spec, and an index of a hundred names would be larger than the numbers of some links. Exact tensors
(buffers) and integers keep their names.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.state import State
from fedpara.wire.encoders.core import Encoder, Layout, codes, refuse_unsendable
from fedpara.wire.tensors import shown

Spec = dict[str, tuple[torch.dtype, torch.Size]]
PLAIN = "__plain__"


def pack_coded(state: State, encoder: Encoder, generator: torch.Generator, exact: frozenset[str]) -> State:
    """The wire tensors of a state, on its device."""
    joined: dict[str, list[Tensor]] = {}
    payload: State = {}
    for name in sorted(state):
        tensor = state[name].detach()
        if name in exact or not tensor.is_floating_point():
            payload[name] = tensor if tensor.dtype not in (torch.float16, torch.bfloat16) else tensor.float()
            continue
        if codes(encoder, tensor.dtype, tensor.shape):
            wide = tensor.float()
            refuse_unsendable(name, wide, encoder.text)
            for part, wire in encoder.encode(wide, generator).items():
                joined.setdefault(f"__{part}__", []).append(wire)
        else:
            refuse_unsendable(name, tensor, encoder.text)
            joined.setdefault(PLAIN, []).append(tensor.float().reshape(-1))
    if taken := [name for name in state if name.startswith("__") and name.endswith("__")]:
        raise WireError(f"a tensor is named {taken[0]!r}: the codec reserves such names. Rename the tensor.")
    return payload | {part: torch.cat(wires) for part, wires in joined.items()}


def read_coded(payload: State, encoder: Encoder, spec: Spec, exact: frozenset[str]) -> State:
    """The state that the payload holds. WireError unless every wire tensor has the type and length of the spec."""
    layouts = _layouts(encoder, spec, exact)
    expected: dict[str, tuple[torch.dtype, int]] = {}
    for layout in layouts.values():
        for part, (dtype, length) in layout.items():
            expected[part] = dtype, length + expected.get(part, (dtype, 0))[1]
    for part, (dtype, length) in expected.items():
        found = payload.get(part)
        if found is None or found.dtype != dtype or found.shape != (length,):
            what = "missing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
            raise WireError(f"{part} is {what}: expected {length} of {dtype} for {encoder.text}.")
    state: State = {}
    for name, tensor in payload.items():
        if name in expected:
            continue
        wrong = tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64)
        if name in layouts or wrong or (tensor.is_floating_point() and name not in exact):
            raise WireError(f"tensor {shown(name)} has type {tensor.dtype} in a {encoder.text} message.")
        state[name] = tensor
    return state | _decoded(payload, encoder, spec, layouts)


def _decoded(payload: State, encoder: Encoder, spec: Spec, layouts: Mapping[str, Layout]) -> State:
    state: State = {}
    start: dict[str, int] = {}
    for name, layout in layouts.items():
        shape, parts = spec[name][1], {}
        for part, (_, length) in layout.items():
            begin = start.get(part, 0)
            parts[part] = payload[part][begin : begin + length]
            start[part] = begin + length
        if PLAIN in parts:
            state[name] = parts[PLAIN].view(shape)
            continue
        try:
            state[name] = encoder.decode({part[2:-2]: wire for part, wire in parts.items()}, shape)
        except WireError as error:
            raise WireError(f"tensor {shown(name)}: {error}") from None
    return state


def _layouts(encoder: Encoder, spec: Spec, exact: frozenset[str]) -> dict[str, Layout]:
    """The wire tensors of each tensor that is joined, by name, in the order of the message."""
    found: dict[str, Layout] = {}
    for name in sorted(spec):
        dtype, shape = spec[name]
        if name in exact or not dtype.is_floating_point:
            continue
        if codes(encoder, dtype, shape):
            found[name] = {f"__{part}__": kind for part, kind in encoder.layout(shape).items()}
        else:
            found[name] = {PLAIN: (torch.float32, shape.numel())}
    return found
