"""Griffe extension: turn the aligned lists of our docstrings into Markdown lists.

    weights     how updates are weighted          ->    - `weights`: how updates are weighted
    max_share   the largest share of one client         - `max_share`: the largest share of one client
"""

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^(\w[\w.]*) {2,}(\S.*)$")


class Plain(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if not all(ENTRY.match(line) or line.startswith("    ") for line in lines) or not ENTRY.match(lines[0]):
        return text
    entries: list[str] = []
    for line in lines:
        if found := ENTRY.match(line):
            entries.append(f"- `{found[1]}`: {found[2]}")
        else:
            entries[-1] += f" {line.strip()}"
    return "\n".join(entries)
