"""Griffe extension: present our docstrings on the site without changing them in the source.

An aligned list becomes a Markdown list:

    weights     how updates are weighted          ->    - `weights`: how updates are weighted
    max_share   the largest share of one client         - `max_share`: the largest share of one client

The comments and docstrings beside a class's fields become one list in the docstring of the class.
"""

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Object

ENTRY = re.compile(r"^(\w[\w.]*(?:, \w+)*) {2,}(\S.*)$")
COMMENT = re.compile(r"^[^#\"']*(?:\"[^\"]*\"[^#\"']*)*#\s*(.+)$")


class Plain(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
        if isinstance(obj, Class) and (fields := list_of_fields(obj)):
            about = f"{obj.docstring.value}\n\n" if obj.docstring else ""
            obj.docstring = Docstring(f"{about}Fields:\n\n{fields}", parent=obj)


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


def list_of_fields(owner: Class) -> str:
    """A line per documented field. Its own docstring goes, so that it is not shown a second time."""
    lines = []
    for name, member in owner.members.items():
        if not isinstance(member, Attribute) or name.startswith("_") or "property" in member.labels:
            continue
        if about := described(member):
            lines.append(f"- `{name}`: {about}")
            member.docstring = None
    return "\n".join(lines)


def described(field: Attribute) -> str:
    if field.docstring is not None:
        return " ".join(field.docstring.value.split())
    found = [match[1] for line in field.source.split("\n") if (match := COMMENT.match(line))]
    return " ".join(found)
