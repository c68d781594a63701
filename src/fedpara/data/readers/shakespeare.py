"""LEAF's Shakespeare: predict the next character of a role from the 80 before it.

Preprocessing follows LEAF: newlines become spaces, runs of spaces become one, and each window of 80 characters is an
example whose label is the next character. 1,129 roles have at least one window; together they have 4,226,158. The
first 90% of each role are train, the rest test. LEAF drops the 79 windows across the cut, and roles that are then left
without a test window. Here they stay, because their labels are not in the training text either.

The arrays are the text itself (4.3 MB) and the lengths of the roles; the windows are cut when the set is built.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedpara.data.examples import Examples
from fedpara.data.sources import Arrays, Finding, Layout, Source, reading
from fedpara.errors import DataError

ALL_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80
_IDS = bytes(max(ALL_LETTERS.find(chr(code)), 0) for code in range(256))


def encode(text: str) -> bytes:
    """The ids of a role's characters, after LEAF's whitespace clean-up."""
    text = re.sub("  +", " ", text.replace("\n", " "))
    if odd := sorted(set(text) - set(ALL_LETTERS)):
        raise ValueError(f"the character {odd[0]!r} is not one of LEAF's {len(ALL_LETTERS)}")
    return text.encode("ascii").translate(_IDS)


def build(arrays: Arrays, classes: int) -> tuple[Examples, Examples]:
    """Train and test windows, uint8 [N, 80]. The label is the next character, the owner is the role."""
    roles = torch.split(arrays["text"], arrays["lengths"].tolist())
    samples = arrays["lengths"] - WINDOW
    first = (0.9 * samples.double()).long().clamp(min=1)

    def part(start: Tensor, stop: Tensor) -> Examples:
        count = stop - start
        inputs = torch.empty(int(count.sum()), WINDOW, dtype=torch.uint8)
        ranges = list(zip(start.tolist(), stop.tolist(), strict=True))
        for rows, role, (a, b) in zip(torch.split(inputs, count.tolist()), roles, ranges, strict=True):
            rows.copy_(role.unfold(0, WINDOW, 1)[a:b])
        labels = torch.cat(
            [role[WINDOW + a : WINDOW + b] for role, (a, b) in zip(roles, ranges, strict=True)]
        )
        owners = torch.repeat_interleave(torch.arange(len(roles)), count)
        return Examples(inputs, labels.long(), classes, owners)

    return part(torch.zeros_like(first), first), part(first, samples)


def _read(files: Sequence[Path]) -> Arrays:
    roles: list[bytes] = []
    for path in files:
        with reading(path):
            role = encode(path.read_text(encoding="utf-8"))
        if len(role) > WINDOW:
            roles.append(role)
    if not roles:
        raise DataError(f"{files[0].parent} has no role of more than {WINDOW} characters.")
    ids = np.frombuffer(b"".join(roles), np.uint8).copy()
    return {"text": torch.from_numpy(ids), "lengths": torch.tensor([len(role) for role in roles])}


def _layout(place: str) -> Layout:
    def find(root: Path) -> Finding:
        files = tuple(sorted((root / place).glob("*.txt")))
        return Finding(files, () if files else ("*.txt",))

    return Layout(place, f"{place}/*.txt", find, _read)


SHAKESPEARE = Source(
    "shakespeare",
    len(ALL_LETTERS),
    "https://github.com/TalwalkarLab/leaf/tree/master/data/shakespeare",
    tuple(
        map(_layout, ("shakespeare/by_play_and_character", "shakespeare/data/raw_data/by_play_and_character"))
    ),
    build=build,
)
