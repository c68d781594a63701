"""Tensors in a file with a digest: checkpoints, and what clients keep. Any safetensors reader opens them."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fedpara import files
from fedpara.algorithms import Variables
from fedpara.errors import RunError, StateError, WireError
from fedpara.state import State
from fedpara.wire import tensors

_DIGEST, _EACH, _BEFORE, _WHOSE = "digest", "sha256", b'{"__metadata__":', "whose"


def write_tensors(path: Path, state: State, metadata: Mapping[str, str], durable: bool = True) -> None:
    """A safetensors file whose metadata carries a digest of all else. Tensors that lie side by side are written as one
    piece, and are side by side when read: a client's hundred small tensors cost what one does."""
    try:
        index, ordered = tensors.lay_out(state)
        data = tensors.memory(ordered)
        header = _header({**metadata, _DIGEST: _digest(metadata, index[8:], data)}, index[8:])
        if len(header) > tensors.MAX_INDEX:
            raise WireError("an index too large")
    except (
        WireError
    ):  # what no message can hold, and a model may: complex numbers, a hundred thousand tensors
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        files.write_tensors(path, contiguous, {**metadata, _EACH: _digest_of_each(contiguous)}, durable)
        return
    with files.replacing(path, durable) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for piece in data:
            file.write(piece)


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors and the metadata; RunError for a file that is cut or altered."""
    state, metadata, _ = _read(path)
    return state(), metadata


def named_digest(path: Path) -> str:
    """The digest that a file just written says it has, from its header alone."""
    with path.open("rb") as file:
        metadata = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    return str(metadata.get(_DIGEST) or metadata[_EACH])


def _read(path: Path) -> tuple[Callable[[], State], dict[str, str], str]:
    """What makes the tensors, the metadata without the digest, and the digest, which the content has."""
    try:
        header, data = tensors.split_index(np.fromfile(path, np.uint8).data)
        metadata, index = _parted(header)
        if _DIGEST in metadata:
            digest = metadata.pop(_DIGEST)
            if digest == _digest(metadata, index, [data]):
                return lambda: tensors.read(index, data), metadata, digest
            raise RunError(f"{path} does not match its digest: it was altered or damaged.")
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error}): expected a whole safetensors file.") from None
    except WireError:
        pass
    return _read_each(path)


def _read_each(path: Path) -> tuple[Callable[[], State], dict[str, str], str]:
    """A file with a digest tensor by tensor: of what no message could hold, or of an earlier version."""
    try:
        state, metadata = files.read_tensors(path)
    except StateError as error:
        raise RunError(str(error)) from None
    digest = _digest_of_each(state)
    if metadata.pop(_EACH, None) != digest:
        raise RunError(f"{path} does not match its digest: it was altered or damaged.")
    return lambda: state, metadata, digest


def _header(metadata: Mapping[str, str], index: bytes) -> bytes:
    """The index with the metadata before all else, padded to a multiple of 8 bytes."""
    rest = index.rstrip()[1:]
    text = _BEFORE + json.dumps(dict(metadata)).encode() + (b"," if rest != b"}" else b"") + rest
    return text + b" " * (-len(text) % 8)


def _parted(header: bytes) -> tuple[dict[str, str], bytes]:
    """The inverse: the metadata, and the index without it."""
    try:
        if not header.startswith(_BEFORE):
            raise ValueError
        metadata, end = json.JSONDecoder().raw_decode(header.decode("ascii"), len(_BEFORE))
        index = b"{" + header[end:].rstrip().removeprefix(b",")
        return {str(name): str(value) for name, value in metadata.items()}, index + b" " * (-len(index) % 8)
    except (ValueError, AttributeError, RecursionError):
        raise WireError("it has no metadata") from None


def _digest(metadata: Mapping[str, str], index: bytes, data: Sequence[memoryview]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode() + index)
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def _digest_of_each(state: State) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def write_groups(
    path: Path, groups: Variables, durable: bool = True, whose: tuple[int, int] | None = None
) -> None:
    """What a client keeps, as one file: tensors under `group/name`; a group without tensors is named too. `whose` is
    the client and the round, so that a file under another's name is found out.
    """
    state = {f"{group}/{name}": t for group, members in groups.items() for name, t in members.items()}
    own = {} if whose is None else {_WHOSE: f"client {whose[0]}, round {whose[1]}"}
    write_tensors(path, state, {"groups": json.dumps(list(groups)), **own}, durable)


def read_groups(path: Path, whose: tuple[int, int] | None = None, digest: str | None = None) -> Variables:
    """RunError for a file that says it is another's, or that is not the one with this digest."""
    state, metadata, found = _read(path)
    _refuse_another(path, metadata, whose, found, digest)
    groups: Variables = {group: {} for group in json.loads(metadata["groups"])}
    for name, tensor in state().items():
        group, _, rest = name.partition("/")
        groups[group][rest] = tensor
    return groups


def verify_groups(path: Path, whose: tuple[int, int], digest: str | None = None) -> str:
    """The file's digest; RunError where `read_groups` would raise one. No tensor is made."""
    _, metadata, found = _read(path)
    _refuse_another(path, metadata, whose, found, digest)
    return found


def _refuse_another(
    path: Path, metadata: Mapping[str, str], whose: tuple[int, int] | None, found: str, digest: str | None
) -> None:
    """RunError for another client's or round's file; one of an earlier version does not say whose it is."""
    if whose is not None and _WHOSE in metadata:
        expected = f"client {whose[0]}, round {whose[1]}"
        if metadata[_WHOSE] != expected:
            raise RunError(
                f"{path} holds what was kept by {metadata[_WHOSE]}: expected that of {expected}. Bring back the file "
                "it was, or start the run anew."
            )
    if digest not in (None, found):
        raise RunError(f"{path} is not the file that the checkpoint counts on: its digest is another.")
