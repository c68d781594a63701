"""The payload of a message whose link has an encoder.

All encoded tensors together, in the order of their names, are the wire tensors `__codes__`, `__scales__` and so on;
float tensors that are not encoded are joined as `__plain__`. Names and shapes are not sent: both ends know
them from the spec, and an index of a hundred names would be larger than the payload of some links. Exact tensors
(buffers) and integers keep their names.
"""

import torch
from torch import Tensor

from fedpara.errors import WireError
from fedpara.state import State
from fedpara.wire.encoders.core import AtMost, Encoder, codes, refuse_unsendable
from fedpara.wire.tensors import shown

Spec = dict[str, tuple[torch.dtype, torch.Size]]
PLAIN = "__plain__"


def pack_coded(state: State, encoder: Encoder, generator: torch.Generator, exact: frozenset[str]) -> State:
    """The wire tensors of a state, on its device."""
    if taken := [name for name in state if name.startswith("__") and name.endswith("__")]:
        raise WireError(f"a tensor is named {taken[0]!r}: the codec reserves such names. Rename the tensor.")
    payload: State = {}
    coded: State = {}
    plain: State = {}
    for name in sorted(state):
        tensor = state[name].detach()
        if not tensor.is_floating_point():
            payload[name] = tensor
        elif name in exact:
            payload[name] = tensor if tensor.dtype == torch.float64 else tensor.float()
        else:
            (coded if codes(encoder, tensor.dtype, tensor.shape) else plain)[name] = tensor.float()
    refuse_unsendable(coded | plain, encoder.text)
    if coded:
        wires = encoder.encode(list(coded.values()), generator)
        payload |= {f"__{part}__": wire for part, wire in wires.items()}
    if plain:
        payload[PLAIN] = torch.cat([tensor.reshape(-1) for tensor in plain.values()])
    return payload


def read_coded(payload: State, encoder: Encoder, spec: Spec, exact: frozenset[str]) -> State:
    """The state that the payload holds. WireError unless every wire tensor has the type and length of the spec."""
    coded, plain = _names(encoder, spec, exact)
    shapes = [spec[name][1] for name in coded]
    layout = encoder.layout(shapes) if coded else {}
    expected = {f"__{part}__": kind for part, kind in layout.items()}
    if plain:
        expected[PLAIN] = torch.float32, sum(spec[name][1].numel() for name in plain)
    for part, (dtype, length) in expected.items():
        found = payload.get(part)
        if found is None or found.dtype != dtype or not _has_length(found, length):
            what = "missing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
            most = "at most " if isinstance(length, AtMost) else ""
            raise WireError(f"{part} is {what}: expected {most}{length} of {dtype} for {encoder.text}.")
    state: State = {}
    for name, tensor in payload.items():
        if name in expected:
            continue
        wrong = tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64)
        if name in coded or name in plain or wrong or (tensor.is_floating_point() and name not in exact):
            raise WireError(f"tensor {shown(name)} has type {tensor.dtype} in a {encoder.text} message.")
        state[name] = tensor
    if coded:
        made = encoder.decode({part: payload[f"__{part}__"] for part in layout}, shapes)
        state |= dict(zip(coded, made, strict=True))
    if plain:
        pieces = payload[PLAIN].split([spec[name][1].numel() for name in plain])
        state |= {name: piece.view(spec[name][1]) for name, piece in zip(plain, pieces, strict=True)}
    return state


def _has_length(wire: Tensor, length: int) -> bool:
    return wire.dim() == 1 and (len(wire) == length or (isinstance(length, AtMost) and len(wire) < length))


def _names(encoder: Encoder, spec: Spec, exact: frozenset[str]) -> tuple[list[str], list[str]]:
    """(the names of encoded tensors, the names of tensors sent as float32), each in the order of the message."""
    floats = [name for name in sorted(spec) if name not in exact and spec[name][0].is_floating_point]
    coded = {name for name in floats if codes(encoder, *spec[name])}
    return [name for name in floats if name in coded], [name for name in floats if name not in coded]
