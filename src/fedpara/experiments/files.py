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
    raw = path.read_bytes().split(b"\n")[:-1]
    try:
        lines = [json.loads(line) for line in raw]
        if all(type(line["round"]) is int for line in lines):
            return list(zip(raw, lines, strict=True))
    except (ValueError, TypeError, KeyError):
        pass
    raise RunError(f"{path} is damaged: expected a JSON object with a round in every line.")


def _digest(state: State) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
