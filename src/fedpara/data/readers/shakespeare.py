"""LEAF's Shakespeare: predict the next character of a role from the 80 before it.

Preprocessing follows LEAF: newlines become spaces, runs of spaces become one, and each window of 80 characters is an
example whose label is the next character. 1,129 roles have at least one window; together they have 4,226,158. The
first 90% of each role are train, the rest test. LEAF drops the 79 windows across the cut, and roles that are then left
without a test window. Here they stay, because their labels are not in the training text either.

Two subsets follow Acar et al. (2021), which the paper cites: 100 clients of 2,000 training and 400 test windows.

    shakespeare-100         of the first 100 roles that have enough: the first 2,000 windows, and the first 400 after
                            80% of the role; the 79 windows across the cut are left out, so the two share no character
    shakespeare-100-mixed   240,000 windows drawn from all text, then split, as LEAF's IID sampler does: a test window
                            overlaps training windows by up to 79 characters, and its label stands inside some

The arrays are the text itself (4.3 MB) and the lengths of the roles; the windows are cut when the set is built.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedpara.data.examples import Examples
from fedpara.data.sources import Arrays, Finding, Layout, Source, reading
from fedpara.errors import DataError

ALL_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80
CLIENTS, TRAIN, TEST = 100, 2000, 400  # of Acar et al.
Build = Callable[[Arrays, int], tuple[Examples, Examples]]
_IDS = bytes(max(ALL_LETTERS.find(chr(code)), 0) for code in range(256))


def encode(text: str) -> bytes:
    """The ids of a role's characters, after LEAF's whitespace clean-up."""
    text = re.sub("  +", " ", text.replace("\n", " "))
    if odd := sorted(set(text) - set(ALL_LETTERS)):
        raise ValueError(f"the character {odd[0]!r} is not one of LEAF's {len(ALL_LETTERS)}")
    return text.encode("ascii").translate(_IDS)


def build(arrays: Arrays, classes: int) -> tuple[Examples, Examples]:
    """Train and test windows, uint8 [N, 80]. The label is the next character, the owner is the role."""
    samples = arrays["lengths"] - WINDOW
    first = (0.9 * samples.double()).long().clamp(min=1)
    roles = torch.arange(len(samples))
    return (
        _windows(arrays, classes, roles, torch.zeros_like(first), first),
        _windows(arrays, classes, roles, first, samples),
    )


def build_apart(
    arrays: Arrays, classes: int, clients: int = CLIENTS, train: int = TRAIN, test: int = TEST
) -> tuple[Examples, Examples]:
    """`train` and `test` windows of each of the first `clients` roles that have enough, without a common character."""
    samples = arrays["lengths"] - WINDOW
    cut = (0.8 * samples.double()).long()
    start = cut + WINDOW - 1
    able = torch.nonzero((cut >= train) & (samples - start >= test))[:, 0]
    if len(able) < clients:
        raise DataError(
            f"{len(able)} roles have {train} training and {test} test windows: expected {clients}."
        )
    roles = able[:clients]
    zero = torch.zeros_like(roles)
    return (
        _windows(arrays, classes, roles, zero, zero + train),
        _windows(arrays, classes, roles, start[roles], start[roles] + test),
    )


def build_mixed(
    arrays: Arrays, classes: int, clients: int = CLIENTS, train: int = TRAIN, test: int = TEST
) -> tuple[Examples, Examples]:
    """`clients` times `train` and `test` windows, drawn from all of them without replacement, and only then split."""
    samples = arrays["lengths"] - WINDOW
    total, wanted = int(samples.sum()), clients * (train + test)
    if total < wanted:
        raise DataError(f"the roles have {total} windows: expected {wanted}.")
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:wanted]
    ends = samples.cumsum(0)
    roles = torch.searchsorted(ends, drawn, right=True)
    offsets = arrays["lengths"].cumsum(0) - arrays["lengths"]
    at = offsets[roles] + drawn - (ends - samples)[roles]
    text = arrays["text"]
    whole = Examples(text[at[:, None] + torch.arange(WINDOW)], text[at + WINDOW].long(), classes, roles)
    return whole.part(slice(clients * train)), whole.part(slice(clients * train, None))


def _windows(arrays: Arrays, classes: int, roles: Tensor, start: Tensor, stop: Tensor) -> Examples:
    """The windows from `start` to `stop` of each of the roles."""
    texts, count = torch.split(arrays["text"], arrays["lengths"].tolist()), stop - start
    inputs = torch.empty(int(count.sum()), WINDOW, dtype=torch.uint8)
    ranges = list(zip((texts[role] for role in roles), start.tolist(), stop.tolist(), strict=True))
    for rows, (text, a, b) in zip(torch.split(inputs, count.tolist()), ranges, strict=True):
        rows.copy_(text.unfold(0, WINDOW, 1)[a:b])
    labels = torch.cat([text[WINDOW + a : WINDOW + b] for text, a, b in ranges])
    return Examples(inputs, labels.long(), classes, torch.repeat_interleave(roles, count))


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


def _source(name: str, build: Build) -> Source:
    places = ("shakespeare/by_play_and_character", "shakespeare/data/raw_data/by_play_and_character")
    publisher = "https://github.com/TalwalkarLab/leaf/tree/master/data/shakespeare"
    return Source(name, len(ALL_LETTERS), publisher, tuple(map(_layout, places)), build=build)


SHAKESPEARE = _source("shakespeare", build)
SHAKESPEARE_100 = _source("shakespeare-100", build_apart)
SHAKESPEARE_100_MIXED = _source("shakespeare-100-mixed", build_mixed)
