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
"""What every line of a run's files has: whoever reads them relies on it."""


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
        except (ValueError, TypeError, KeyError, RecursionError):
            whole = False
        if not whole:
            raise RunError(
                f"{path} is damaged in line {len(found) + 1}: expected a JSON object with {', '.join(fields)} "
                "in every line."
            )
        found.append((raw, line))
    return found
