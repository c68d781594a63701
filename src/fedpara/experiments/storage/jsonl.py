"""Append-only JSON lines: the metrics and timing of a run, and the scores of its clients."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedpara import files
from fedpara.errors import RunError

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
    "clients.jsonl": {**dict.fromkeys(("round", "client", "examples"), _WHOLE), "scores": (dict,)},
}
"""The fields that every line must have, with their types. A line may have more."""


def read_lines(path: Path) -> list[Line]:
    """The lines of a .jsonl file, without a last line that a kill truncated."""
    return [_parse(path, i, raw) for i, raw in enumerate(raw_lines(path), 1)]


def append_line(path: Path, line: Line, durable: bool = True) -> bytes:
    """Append the line and return its bytes. See `append_lines`."""
    return append_lines(path, [line], durable)


def append_lines(path: Path, lines: Iterable[Line], durable: bool = True) -> bytes:
    """Append the lines and return their bytes.

    If `durable`, sync them to disk, so that after a power loss no checkpoint exists without its lines.
    """
    content = b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)
    with path.open("ab") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    return content


def raw_lines(path: Path) -> list[bytes]:
    """The lines as bytes with their line ends, without a truncated last line."""
    return [raw + b"\n" for raw in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def first_rounds(path: Path, last: int) -> bytes:
    """The lines of rounds 1 to `last`. RunError if one of them is missing or damaged. Later lines are not read."""
    lines = raw_lines(path)[:last]
    if [_parse(path, i, raw)["round"] for i, raw in enumerate(lines, 1)] != [*range(1, last + 1)]:
        raise RunError(f"{path} lacks rounds up to {last}: expected one line per round.")
    return b"".join(lines)


def drop_rounds_after(path: Path, last: int) -> None:
    """Remove the lines after round `last`, and the end of the file if a power loss damaged it."""
    lines = raw_lines(path)
    end = max((i for i, raw in enumerate(lines, 1) if _is_of(path, i, raw, last)), default=0)
    for i, raw in enumerate(lines[:end], 1):
        _parse(path, i, raw)
    if path.exists() and path.read_bytes() != b"".join(lines[:end]):
        files.write_bytes(path, b"".join(lines[:end]))


def _is_of(path: Path, number: int, raw: bytes, last: int) -> bool:
    try:
        return bool(_parse(path, number, raw)["round"] <= last)
    except RunError:
        return False


def _parse(path: Path, number: int, raw: bytes) -> Line:
    fields = FIELDS.get(path.name, {"round": _WHOLE})
    try:
        line: Line = json.loads(raw)
        if all(type(line[name]) in types for name, types in fields.items()):
            return line
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise RunError(f"{path} is damaged in line {number}: expected a JSON object with {', '.join(fields)}.")
