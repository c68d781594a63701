"""The two kinds of files in a run folder: tensors with a digest, and lines of JSON that only grow."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedpara import files
from fedpara.algorithms import Groups
from fedpara.errors import RunError, StateError
from fedpara.state import State

Line = dict[str, Any]
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
    """A safetensors file whose metadata carries a digest of its tensors."""
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    files.write_tensors(path, contiguous, {**metadata, "sha256": _digest(contiguous)}, durable)


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors and the metadata; RunError for a file that is cut or altered."""
    try:
        state, metadata = files.read_tensors(path)
    except StateError as error:
        raise RunError(str(error)) from None
    if metadata.pop("sha256", None) != _digest(state):
        raise RunError(f"{path} does not match its digest: it was altered or damaged.")
    return state, metadata


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


def _digest(state: State) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
