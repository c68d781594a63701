"""Safetensors files with a SHA-256 digest in their metadata: checkpoints and client memories.

There are two layouts. Any safetensors reader opens both.

    digest    of the metadata, the index and the data, which are laid out as in a message. Tensors that are neighbours
              in memory are written and read as one block: a hundred small tensors cost as much as one.
    sha256    of each tensor's name, type, shape and bytes. Used by earlier versions, and for tensors that no message
              can hold: complex numbers, or a hundred thousand tensors.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedpara import files
from fedpara.algorithms import Variables
from fedpara.errors import RunError, StateError, WireError
from fedpara.state import State
from fedpara.wire import tensors

_DIGEST, _DIGEST_BY_TENSOR, _ORIGIN = "digest", "sha256", "whose"
_METADATA = b'{"__metadata__":'

Piece = bytes | memoryview
Origin = tuple[int, int]
"""The client and round of a client memory."""


@dataclass(frozen=True, eq=False)
class _Content:
    """The content of a file whose digest matches. `tensors` builds the state."""

    metadata: dict[str, str]
    digest: str
    tensors: Callable[[], State]


def write_tensors(path: Path, state: State, metadata: Mapping[str, str], durable: bool = True) -> None:
    """Write the tensors and the metadata with their digest."""
    message = _message_layout(state, metadata)
    if message is None:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        metadata = {**metadata, _DIGEST_BY_TENSOR: _sha256(_by_tensor(state))}
        files.write_tensors(path, state, metadata, durable)
        return
    header, data = message
    with files.replacing(path, durable) as temporary, temporary.open("wb") as file:
        file.writelines([len(header).to_bytes(8, "little"), header, *data])


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors and the metadata. RunError if the file is truncated or changed."""
    content = _read(path)
    return content.tensors(), content.metadata


def named_digest(path: Path) -> str:
    """The digest in the header of the file. The content is not read or verified."""
    with path.open("rb") as file:
        metadata = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    return str(metadata.get(_DIGEST) or metadata[_DIGEST_BY_TENSOR])


def write_memory(path: Path, memory: Variables, durable: bool = True, origin: Origin | None = None) -> None:
    """Write a client memory: each tensor as `variable/name`, and the names of all variables, even empty ones.

    With `origin` in the file, a reader detects a file that was renamed to another client or round.
    """
    state = {f"{variable}/{name}": t for variable, tensors in memory.items() for name, t in tensors.items()}
    named = {} if origin is None else {_ORIGIN: _in_words(origin)}
    write_tensors(path, state, {"groups": json.dumps(list(memory)), **named}, durable)


def read_memory(path: Path, origin: Origin | None = None, digest: str | None = None) -> Variables:
    """A client memory. RunError if its origin or digest differs from the given one."""
    content = _read_memory(path, origin, digest)
    memory: Variables = {variable: {} for variable in json.loads(content.metadata["groups"])}
    for name, tensor in content.tensors().items():
        variable, _, rest = name.partition("/")
        memory[variable][rest] = tensor
    return memory


def verify_memory(path: Path, origin: Origin, digest: str | None = None) -> str:
    """The file's digest, after the checks of `read_memory`. No tensor is built."""
    return _read_memory(path, origin, digest).digest


def _read_memory(path: Path, origin: Origin | None, digest: str | None) -> _Content:
    content = _read(path)
    stated = content.metadata.get(_ORIGIN)  # earlier versions did not write it
    if stated and origin and stated != _in_words(origin):
        raise RunError(
            f"{path} is the memory of {stated}: expected that of {_in_words(origin)}. Restore the original file, or "
            "start the run again in a new folder."
        )
    if digest not in (None, content.digest):
        raise RunError(f"{path} is not the file that the checkpoint refers to: their digests differ.")
    return content


def _in_words(origin: Origin) -> str:
    return f"client {origin[0]}, round {origin[1]}"


def _read(path: Path) -> _Content:
    """RunError if the file is not safetensors or does not match its digest."""
    stated, content = _read_message_layout(path) or _read_any_layout(path)
    if stated != content.digest:
        raise RunError(f"{path} does not match its digest: it was changed or damaged.")
    return content


def _read_message_layout(path: Path) -> tuple[str, _Content] | None:
    """(the digest in the file, its content). None if the file does not have this layout."""
    try:
        header, data = tensors.split_index(np.fromfile(path, np.uint8).data)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error}): expected a whole safetensors file.") from None
    except WireError:
        return None
    metadata, index = _split_header(header)
    if _DIGEST not in metadata:
        return None
    stated = metadata.pop(_DIGEST)
    return stated, _Content(
        metadata, _sha256(_whole(metadata, index, [data])), lambda: tensors.read(index, data)
    )


def _read_any_layout(path: Path) -> tuple[str | None, _Content]:
    try:
        state, metadata = files.read_tensors(path)
    except StateError as error:
        raise RunError(str(error)) from None
    stated = metadata.pop(_DIGEST_BY_TENSOR, None)
    return stated, _Content(metadata, _sha256(_by_tensor(state)), lambda: state)


def _message_layout(state: State, metadata: Mapping[str, str]) -> tuple[bytes, Sequence[memoryview]] | None:
    """(the header, the data) in a message's layout, or None if a message cannot hold them."""
    try:
        index, ordered = tensors.lay_out(state)
    except WireError:
        return None
    data = tensors.memory(ordered)
    digest = _sha256(_whole(metadata, index[8:], data))
    header = _join_header({**metadata, _DIGEST: digest}, index[8:])
    return (header, data) if len(header) <= tensors.MAX_INDEX else None


def _join_header(metadata: Mapping[str, str], index: bytes) -> bytes:
    """The index with the metadata as its first entry, padded to a multiple of 8 bytes."""
    rest = index.rstrip()[1:]
    text = _METADATA + json.dumps(dict(metadata)).encode() + (b"," if rest != b"}" else b"") + rest
    return text + b" " * (-len(text) % 8)


def _split_header(header: bytes) -> tuple[dict[str, str], bytes]:
    """The inverse of `_join_header`. The metadata is empty if the header does not begin with it."""
    if not header.startswith(_METADATA):
        return {}, header
    try:
        metadata, end = json.JSONDecoder().raw_decode(header.decode("ascii"), len(_METADATA))
        index = b"{" + header[end:].rstrip().removeprefix(b",")
        return {str(name): str(value) for name, value in metadata.items()}, index + b" " * (-len(index) % 8)
    except (ValueError, AttributeError, RecursionError):
        return {}, header


def _sha256(pieces: Iterable[Piece]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _whole(metadata: Mapping[str, str], index: bytes, data: Sequence[memoryview]) -> list[Piece]:
    return [json.dumps(dict(metadata), sort_keys=True).encode(), index, *data]


def _by_tensor(state: State) -> Iterator[Piece]:
    for name in sorted(state):
        tensor = state[name].contiguous()
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data
