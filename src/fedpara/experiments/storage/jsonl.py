"""Lines of JSON in a file that only grows: a run's metrics and timing."""

import json
import os
from collections.abc import Mapping
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
}
"""What every line of a run's files has: whoever reads them relies on it. A line may have more."""


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a .jsonl file; a last line cut short by a kill is left out."""
    return [_parse(path, i, raw) for i, raw in enumerate(raw_lines(path), 1)]


def append_line(path: Path, line: Line, durable: bool = True) -> bytes:
    """Append the line and return its bytes.

    If `durable`, it is on the disk when this returns: a checkpoint written later must not outlive it.
    """
    content = json.dumps(line, allow_nan=False).encode() + b"\n"
    with path.open("ab") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    return content


def raw_lines(path: Path) -> list[bytes]:
    """The lines as they are in the file, each with its end; one that was cut short is left out."""
    return [raw + b"\n" for raw in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def first_rounds(path: Path, last: int) -> bytes:
    """The lines of rounds 1 to `last`, in that order. RunError if one of them is missing or damaged; what follows
    them is not read.
    """
    lines = raw_lines(path)[:last]
    if [_parse(path, i, raw)["round"] for i, raw in enumerate(lines, 1)] != [*range(1, last + 1)]:
        raise RunError(f"{path} lacks rounds up to {last}: expected a line for each of them.")
    return b"".join(lines)


def keep_rounds(path: Path, last: int) -> None:
    """Drop the lines after round `last`, and an end that a power loss damaged."""
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
    raise RunError(
        f"{path} is damaged in line {number}: expected a JSON object with {', '.join(fields)} in every line."
    )
