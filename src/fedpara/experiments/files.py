"""Files that are whole or not there: written beside, then moved into place."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedpara.errors import RunError
from fedpara.state import State


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_tensors(path: Path, state: State, metadata: Mapping[str, str], durable: bool = True) -> None:
    """A safetensors file whose metadata carries a digest of its tensors."""
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    write_bytes(path, save(contiguous, {**metadata, "sha256": _digest(contiguous)}), durable)


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors and the metadata; RunError for a file that is cut or altered."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as safetensors ({error}): it is cut or damaged.") from None
    if metadata.get("sha256") != _digest(state):
        raise RunError(f"{path} does not match its digest: it was altered or damaged.")
    return state, metadata


def read_lines(path: Path) -> list[dict[str, object]]:
    """The whole lines of a .jsonl file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line]


def _digest(state: State) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
