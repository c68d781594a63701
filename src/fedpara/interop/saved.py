"""A factorized state on disk: a safetensors file whose metadata says how each weight is written.

    fedpara         the version of this format
    forms           {weight: {"scheme", "rank", "shape", "nonlinearity", "conv"}} as JSON; "adapter_scale" for adapters
    model           a description of the network (see `rebuild`), as JSON; optional
    preprocessing   {"mean", "std", "scale", "dtype", "shape", "classes"} of raw inputs, as JSON; optional
    crc32           over the texts above and every tensor's name, type, shape and bytes

So the file can be merged without its model. A safetensors file without this metadata is a dense state, unless
its metadata marks it as a file of a run folder. Those hold factors, and only the run knows their forms.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedpara.errors import StateError, in_a_line
from fedpara.files import read_tensors, write_tensors
from fedpara.interop.preprocessing import Preprocessing
from fedpara.interop.rebuild import EXPECTED, Description, is_description, shape_of
from fedpara.parameterization import Form, as_they_are, compose_state
from fedpara.parameterization.description import describe_form, read_form
from fedpara.parameterization.naming import BASE, mismatch
from fedpara.state import State

VERSION = "1"

RUN_FILES = {"a run's checkpoint": {"identity", "round"}, "a client's memory of a run": {"groups"}}
"""The files of a run folder, by the keys of their metadata."""


@dataclass(frozen=True)
class SavedState:
    """A state, the forms of its weights, a description of its network, and how its inputs are normalised."""

    state: State
    forms: Mapping[str, Form] = field(default_factory=dict)
    model: Description | None = None
    preprocessing: Preprocessing | None = None

    def __post_init__(self) -> None:
        check_factors(self.state, self.forms)
        if self.model is not None and not is_description(self.model):
            raise StateError(f"the description of the model is {self.model}: {EXPECTED}.")
        shape = shape_of(self.model or {})
        if self.preprocessing is not None and shape is not None and not self.preprocessing.fits(shape):
            raise StateError(
                f"the mean {list(self.preprocessing.mean)} does not fit inputs of shape {list(shape)}: expected images "
                "with one mean per channel."
            )

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
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write a state for `read_state`, replacing any file at `path` atomically."""
    saved = SavedState(dict(state), forms, model, preprocessing)
    metadata = {"format": "pt", "fedpara": VERSION}
    metadata["forms"] = json.dumps({weight: describe_form(weight, form) for weight, form in forms.items()})
    if model is not None:
        metadata["model"] = json.dumps(dict(model))
    if preprocessing is not None:
        known = {key: value for key, value in (model or {}).items() if key in ("shape", "classes")}
        metadata["preprocessing"] = json.dumps(preprocessing.to_entry() | known)
    # Copies: tied weights share memory, which safetensors rejects.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in saved.state.items()
    }
    metadata["crc32"] = _crc32(tensors, metadata)
    write_tensors(Path(path), tensors, metadata)


def read_state(path: str | os.PathLike[str]) -> SavedState:
    """The state in a file. StateError if the file is missing, truncated, damaged, or of another kind."""
    state, metadata = read_tensors(Path(path))
    if metadata.keys() & {"fedpara", "forms", "crc32"}:
        try:
            return _understand(state, metadata)
        except Exception as error:  # a foreign file may break any assumption
            raise StateError(
                f"{path} cannot be read ({in_a_line(error)}): expected a state as fedpara saved it. Copy it again, or "
                "read it with the version of fedpara that wrote it."
            ) from error
    for what, keys in RUN_FILES.items():
        if keys <= metadata.keys():
            raise StateError(f"{path} is {what}: expected a state. Export the run's folder instead.")
    return SavedState(state)


def check_factors(state: Mapping[str, Tensor], forms: Mapping[str, Form]) -> None:
    """StateError unless the state holds each form's factors, an adapter's W0, and no composed weight."""
    shapes = {f"{weight}.{factor}": s for weight, form in forms.items() for factor, s in form.factors.items()}
    shapes |= {f"{weight}.{BASE}": form.shape for weight, form in forms.items() if form.scale is not None}
    given = {name: t for name, t in state.items() if name in forms or name.rpartition(".")[0] in forms}
    if wrong := mismatch(given, shapes):
        raise StateError(f"the state does not fit its forms; {wrong}. Use the forms of its own model.")


def _understand(state: State, metadata: Mapping[str, str]) -> SavedState:
    """Raises on anything unusual; `read_state` turns that into one error."""
    if metadata["fedpara"] != VERSION:
        raise ValueError(f"its format is version {metadata['fedpara']!r}")
    if metadata["crc32"] != _crc32(state, metadata):
        raise ValueError("its checksum does not match its content")
    forms = {weight: read_form(**entry) for weight, entry in json.loads(metadata["forms"]).items()}
    model = json.loads(metadata["model"]) if "model" in metadata else None
    preprocessing = None
    if "preprocessing" in metadata:
        preprocessing = Preprocessing.from_entry(json.loads(metadata["preprocessing"]))
    return SavedState(state, forms, model, preprocessing)


def _crc32(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    sum_ = zlib.crc32(f"{metadata.get('forms')}\n{metadata.get('model')}".encode())
    if "preprocessing" in metadata:
        sum_ = zlib.crc32(f"\n{metadata['preprocessing']}".encode(), sum_)
    for name, tensor in sorted(state.items()):
        sum_ = zlib.crc32(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode(), sum_)
        sum_ = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, sum_)
    return f"{sum_:08x}"
