"""LEAF's Shakespeare: predict the next character of a role from the 80 before it.

Preprocessing as LEAF's: newlines to spaces, runs of two or more spaces to one, every window of 80
characters and the character after it. 1,129 roles have at least one, 4,226,158 together. Per role the first
90% are train and the rest test. LEAF also drops the 79 windows that straddle the cut, and with them every
role left without a test window; they are kept here: their labels are not in the training text either.

The arrays are the text itself (4.3 MB) and the roles' lengths; windows are cut when the set is built.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedpara.data.examples import Examples
from fedpara.data.sources import Arrays, Finding, Layout, Source
from fedpara.errors import DataError

ALL_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80
_IDS = bytes(max(ALL_LETTERS.find(chr(code)), 0) for code in range(256))


def encode(text: str, where: str) -> bytes:
    """The ids of a role's characters, after LEAF's clean-up of the white space."""
    text = re.sub("  +", " ", text.replace("\n", " "))
    if odd := sorted(set(text) - set(ALL_LETTERS)):
        raise DataError(f"{where}: character {odd[0]!r} is not among LEAF's {len(ALL_LETTERS)} letters.")
    return text.encode("ascii").translate(_IDS)


def build(arrays: Arrays, classes: int) -> tuple[Examples, Examples]:
    """Train and test windows, uint8 [N, 80], with the character after each as label and the role as owner."""
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
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is damaged: expected text ({error}).") from None
        role = encode(text, str(path))
        if len(role) > WINDOW:
            roles.append(role)
    if not roles:
        raise DataError(f"{files[0].parent}: expected roles of more than {WINDOW} characters, found none.")
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
