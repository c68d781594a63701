"""The two kinds of files in a run folder: tensors with a digest, and lines of JSON that only grow."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpara import files
from fedpara.algorithms import Groups
from fedpara.errors import RunError, WireError
from fedpara.state import State
from fedpara.wire import tensors

Line = dict[str, Any]
_DIGEST, _BEFORE = "digest", b'{"__metadata__":'
_WHOLE, _NUMBER, _LIST = (int,), (int, float), (list,)
_MAYBE = (*_NUMBER, type(None))
FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "metrics.jsonl": {
        **dict.fromkeys(("round", "clients", "up", "down", "total_up", "total_down"), _WHOLE),
        **dict.fromkeys(("accuracy", "loss", "before", "after", "train_loss"), _MAYBE),
        **dict.fromkeys(("refused", "notes"), _LIST),
    },
    "timing.jsonl": {"round": _WHOLE, "seconds": _NUMBER},
}
"""What every line of a run's files has: whoever reads them relies on it."""


def write_tensors(path: Path, state: State, metadata: Mapping[str, str], durable: bool = True) -> None:
    """A safetensors file whose metadata carries a digest of all else. Tensors that lie side by side are written as one
    piece, and are side by side when read: a client's hundred small tensors cost what one does."""
    index, data = tensors.write(state)
    header = _header({**metadata, _DIGEST: _digest(metadata, index[8:], data)}, index[8:])
    with files.replacing(path, durable) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for piece in data:
            file.write(piece)


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors and the metadata; RunError for a file that is cut or altered."""
    try:
        header, data = tensors.split_index(np.fromfile(path, np.uint8).data)
        metadata, index = _parted(header)
        if metadata.pop(_DIGEST, None) == _digest(metadata, index, [data]):
            return tensors.read(index, [data]), metadata
    except (OSError, WireError) as error:
        raise RunError(f"{path} cannot be read ({error}): expected a whole safetensors file.") from None
    raise RunError(
        f"{path} does not match its digest: it was altered, damaged or written by an earlier version."
    )


def _header(metadata: Mapping[str, str], index: bytes) -> bytes:
    """The index with the metadata before all else, padded to a multiple of 8 bytes."""
    rest = index.rstrip()[1:]
    text = _BEFORE + json.dumps(dict(metadata)).encode() + (b"," if rest != b"}" else b"") + rest
    return text + b" " * (-len(text) % 8)


def _parted(header: bytes) -> tuple[dict[str, str], bytes]:
    """The inverse: the metadata, and the index without it."""
    try:
        text = header.decode("ascii")
        metadata, end = json.JSONDecoder().raw_decode(text, text.index(_BEFORE.decode()) + len(_BEFORE))
        index = b"{" + header[end:].rstrip().removeprefix(b",")
        return {str(name): str(value) for name, value in metadata.items()}, index + b" " * (-len(index) % 8)
    except (ValueError, AttributeError):
        raise WireError("it has no metadata") from None


def _digest(metadata: Mapping[str, str], index: bytes, data: Sequence[memoryview]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode() + index)
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def write_groups(path: Path, groups: Groups, durable: bool = True) -> None:
    """What a client keeps, as one file: tensors under `group/name`; a group without tensors is named too."""
    state = {f"{group}/{name}": t for group, members in groups.items() for name, t in members.items()}
    write_tensors(path, state, {"groups": json.dumps(list(groups))}, durable)


def read_groups(path: Path) -> Groups:
    state, metadata = read_tensors(path)
    groups: Groups = {group: {} for group in json.loads(metadata["groups"])}
    for name, tensor in state.items():
        group, _, rest = name.partition("/")
        groups[group][rest] = tensor
    return groups


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a .jsonl file; a last line cut short by a kill is left out."""
    return [line for _, line in _whole_lines(path)]


def append_line(path: Path, line: Line, durable: bool = True) -> None:
    """If `durable`, on the disk when this returns: a checkpoint written later must not outlive it."""
    with path.open("ab") as file:
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())


def keep_rounds(path: Path, last: int) -> None:
    """Drop what was cut short and what came after round `last`."""
    kept = b"".join(raw + b"\n" for raw, line in _whole_lines(path) if line["round"] <= last)
    if path.exists() and path.read_bytes() != kept:
        files.write_bytes(path, kept)


def _whole_lines(path: Path) -> list[tuple[bytes, Line]]:
    if not path.exists():
        return []
    fields = FIELDS.get(path.name, {"round": _WHOLE})
    found: list[tuple[bytes, Line]] = []
    for raw in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = json.loads(raw)
            whole = all(type(line[name]) in types for name, types in fields.items())
        except (ValueError, TypeError, KeyError):
            whole = False
        if not whole:
            raise RunError(
                f"{path} is damaged in line {len(found) + 1}: expected a JSON object with {', '.join(fields)} "
                "in every line."
            )
        found.append((raw, line))
    return found
