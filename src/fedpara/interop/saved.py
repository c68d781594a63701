"""A factorized state on disk: safetensors whose metadata says how each weight is written.

    fedpara   the version of this format
    forms     {weight: {"scheme", "rank", "shape", "nonlinearity", "conv"}} as JSON
    model     how the network is built again (`rebuild`), as JSON; absent if nobody said
    crc32     over the two texts above and every tensor's name, type, shape and bytes

So the file can be merged with no model at hand. A safetensors file without this metadata is a dense state, unless
its metadata is that of a file in a run folder: those hold factors, and their forms are the run's to say.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fedpara.errors import SchemeError, StateError, expect_kind
from fedpara.files import read_tensors, write_tensors
from fedpara.interop.rebuild import EXPECTED, Description, is_description
from fedpara.parameterization import SCHEMES, Form, Scheme, as_they_are, compose_state
from fedpara.state import State

VERSION = "1"

OF_A_RUN = {"a run's checkpoint": {"identity", "round"}, "what a client of a run keeps": {"groups"}}
"""The files of a run folder, by what their metadata holds."""


@dataclass(frozen=True)
class SavedState:
    """A state, how its weights are written, and where its network comes from."""

    state: State
    forms: Mapping[str, Form] = field(default_factory=dict)
    model: Description | None = None

    def __post_init__(self) -> None:
        expect_kind("state", self.state, Mapping, StateError)
        for name, tensor in self.state.items():
            expect_kind(name, tensor, Tensor, StateError)
            if is_lazy(tensor) or tensor.layout != torch.strided:
                raise StateError(
                    f"{name} is not initialised yet, or sparse: expected a dense tensor. Run a batch through the "
                    "model first, or use tensor.to_dense()."
                )
        check_factors(self.state, self.forms)
        if self.model is not None and not is_description(self.model):
            raise StateError(f"the description of the model is {self.model}: {EXPECTED}.")

    def merged(self) -> State:
        """The state of the plain model."""
        with torch.no_grad(), as_they_are():
            return compose_state(self.state, self.forms)


def save_state(
    path: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    forms: Mapping[str, Form],
    *,
    model: Description | None = None,
) -> None:
    """Write the state so that `read_state` gives it back, whole or not at all, over what was there."""
    expect_kind("state", state, Mapping, StateError)
    saved = SavedState(dict(state), forms, model)
    metadata = {"format": "pt", "fedpara": VERSION}
    metadata["forms"] = json.dumps({weight: _describe(weight, form) for weight, form in forms.items()})
    if model is not None:
        metadata["model"] = json.dumps(dict(model))
    # A copy each: tied weights share memory, which safetensors refuses.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in saved.state.items()
    }
    metadata["crc32"] = _checksum(tensors, metadata)
    write_tensors(Path(path), tensors, metadata)


def read_state(path: str | os.PathLike[str]) -> SavedState:
    """StateError for a file that is missing, cut, damaged, or something else altogether."""
    state, metadata = read_tensors(Path(path))
    if not metadata.keys() & {"fedpara", "forms", "crc32"}:
        for what, keys in OF_A_RUN.items():
            if keys <= metadata.keys():
                raise StateError(
                    f"{path} is {what}: expected a state by itself, saved or plain. Export the run's folder instead."
                )
        return SavedState(state)
    try:
        return _understand(state, metadata)
    except StateError as error:
        raise StateError(f"{path} cannot be read: {error}") from None


def form_of(scheme: Scheme, shape: tuple[int, ...], rank: int) -> Form:
    """The form of a weight that exists already, at whatever rank it has.

    Unlike `write` it takes a rank above r_max, which `force=True` and other tools allow.
    """
    kernel = len(shape) > 2 and scheme.conv == "tensor"
    factors: dict[str, tuple[int, ...]] = {}
    for suffix in scheme.suffixes:
        factors[f"x{suffix}"] = (shape[0], rank)
        factors[f"y{suffix}"] = (shape[1] if kernel else prod(shape[1:]), rank)
        if kernel:
            factors[f"t{suffix}"] = (rank, rank, *shape[2:])
    return Form(scheme, shape, rank, factors)


def check_factors(state: Mapping[str, Tensor], forms: Mapping[str, Form]) -> None:
    for weight, form in forms.items():
        if weight in state:
            raise StateError(f"the state holds {weight} itself and its form: expected its factors only.")
        for factor, shape in form.factors.items():
            name = f"{weight}.{factor}"
            given = tuple(state[name].shape) if name in state else "no such tensor"
            if given != tuple(shape):
                raise StateError(
                    f"{name} is {given}: expected {tuple(shape)}, since {weight} {form.shape} is written as "
                    f"{form.scheme.name} of rank {form.rank}. Use the forms of the model the state comes from."
                )


def _describe(weight: str, form: Form) -> dict[str, object]:
    scheme = form.scheme
    if type(scheme) is not SCHEMES.get(scheme.name):
        raise StateError(
            f"{weight} is written by {scheme!r}, which a file cannot name: expected one of {', '.join(SCHEMES)}. "
            "Merge the model and save the plain state."
        )
    return {
        "scheme": scheme.name,
        "rank": form.rank,
        "shape": list(form.shape),
        "nonlinearity": scheme.nonlinearity,
        "conv": scheme.conv,
    }


def _understand(state: State, metadata: Mapping[str, str]) -> SavedState:
    if metadata.get("fedpara") != VERSION:
        raise StateError(
            f"its format is version {metadata.get('fedpara')!r}: expected {VERSION!r}. Read it with the fedpara "
            "that wrote it."
        )
    if metadata.get("crc32") != _checksum(state, metadata):
        raise StateError(
            "its checksum does not match its content: expected it as it was written. Copy it again."
        )
    entries = _parse(metadata.get("forms"))
    if not isinstance(entries, dict):
        raise StateError(f"its forms are {entries!r}: expected a form a weight.")
    forms = {weight: _form(weight, entry) for weight, entry in entries.items()}
    return SavedState(state, forms, _parse(metadata["model"]) if "model" in metadata else None)


def _form(weight: str, entry: Any) -> Form:
    try:
        rank, shape = entry["rank"], tuple(entry["shape"])
        if not all(type(size) is int and size > 0 for size in (rank, *shape)) or len(shape) < 2:
            raise ValueError
        options = {} if entry["nonlinearity"] is None else {"nonlinearity": entry["nonlinearity"]}
        scheme: Scheme = SCHEMES[entry["scheme"]](rank=rank, conv=entry["conv"], **options)
    except (KeyError, TypeError, ValueError, SchemeError):
        raise StateError(
            f"the form of {weight} is {entry!r}: expected a scheme of {', '.join(SCHEMES)}, its rank, shape, "
            "nonlinearity and conv."
        ) from None
    return form_of(scheme, shape, rank)


def _parse(text: str | None) -> Any:
    try:
        return json.loads(text or "")
    except (ValueError, RecursionError):
        raise StateError(f"its metadata holds {str(text)[:80]!r}: expected JSON.") from None


def _checksum(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    sum_ = zlib.crc32(f"{metadata.get('forms')}\n{metadata.get('model')}".encode())
    for name, tensor in sorted(state.items()):
        sum_ = zlib.crc32(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode(), sum_)
        sum_ = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, sum_)
    return f"{sum_:08x}"
