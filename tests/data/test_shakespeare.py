"""LEAF's Shakespeare preprocessing, compared with a version that makes one window at a time."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.data import load
from fedpara.data.readers.shakespeare import ALL_LETTERS, encode
from fedpara.errors import DataError

PLACE = "shakespeare/by_play_and_character"


def write(root, roles, place=PLACE):
    (root / place).mkdir(parents=True)
    for name, text in roles.items():
        (root / place / f"{name}.txt").write_bytes(text.encode())


def windows(text):
    text = re.sub(r"   *", r" ", text.replace("\n", " "))
    return [(text[i : i + 80], text[i + 80]) for i in range(len(text) - 80)]


def line(length, seed):
    letters = np.random.default_rng(seed).choice(list("abc XYZ,'!\n"), length)
    return "x" + "".join(letters) + "."


ROLES = {"A": line(400, 0), "B": "Exit.\n", "C": "ab" * 40 + "c", "D": "ab" * 41, "E": line(200, 1)}


def test_there_are_80_different_characters():
    assert len(ALL_LETTERS) == len(set(ALL_LETTERS)) == 80


@settings(deadline=None)
@given(st.text(alphabet=ALL_LETTERS))
def test_encoding_follows_leaf(text):
    cleaned = re.sub(r"   *", r" ", text.replace("\n", " "))
    assert list(encode(text)) == [ALL_LETTERS.find(letter) for letter in cleaned]


@pytest.mark.parametrize("place", [PLACE, "shakespeare/data/raw_data/by_play_and_character"])
def test_windows_labels_owners_and_the_split_by_time(tmp_path, place):
    write(tmp_path, ROLES, place)
    train, test = load("shakespeare", tmp_path)
    speaking = [name for name in sorted(ROLES) if windows(ROLES[name])]
    assert speaking == ["A", "C", "D", "E"]
    expected = {"train": [], "test": []}
    for owner, name in enumerate(speaking):
        samples = windows(ROLES[name])
        cut = max(1, int(0.9 * len(samples)))
        expected["train"] += [(x, y, owner) for x, y in samples[:cut]]
        expected["test"] += [(x, y, owner) for x, y in samples[cut:]]
    for part, examples in (("train", train), ("test", test)):
        assert examples.classes == 80
        assert examples.shape == (80,)
        decoded = ["".join(ALL_LETTERS[i] for i in row) for row in examples.inputs.tolist()]
        labels = [ALL_LETTERS[i] for i in examples.targets.tolist()]
        assert list(zip(decoded, labels, examples.owners.tolist(), strict=True)) == expected[part]


def test_the_shortest_roles_train_first(tmp_path):
    """One window: train only. Two: one each."""
    write(tmp_path, {"one": "a" * 81, "two": "b" * 82})
    train, test = load("shakespeare", tmp_path)
    assert train.owners.tolist() == [0, 1]
    assert test.owners.tolist() == [1]


def test_the_cache_is_the_text_and_gives_the_same_windows(tmp_path):
    write(tmp_path, ROLES)
    first = load("shakespeare", tmp_path)
    again = load("shakespeare", tmp_path)
    for a, b in zip(first, again, strict=True):
        assert a.inputs.equal(b.inputs)
        assert a.targets.equal(b.targets)
        assert a.owners.equal(b.owners)
    assert (tmp_path / "fedpara-cache/shakespeare.safetensors").stat().st_size < 5_000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Caf\u00e9 " * 40, r"A\.txt could not be read .*the character 'é' is not one of LEAF's 80"),
        ("a#b" * 40, r"character '#'"),
    ],
)
def test_an_unknown_character_is_named(tmp_path, content, words):
    write(tmp_path, {"A": content})
    with pytest.raises(DataError, match=words) as error:
        load("shakespeare", tmp_path)
    assert "A.txt" in str(error.value)


def test_bytes_that_are_not_text_are_rejected(tmp_path):
    write(tmp_path, {"A": "x"})
    (tmp_path / PLACE / "A.txt").write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(DataError, match=r"A\.txt could not be read .UnicodeDecodeError"):
        load("shakespeare", tmp_path)


def test_roles_that_are_too_short_are_rejected(tmp_path):
    write(tmp_path, {"A": "a" * 80})
    with pytest.raises(DataError, match="has no role of more than 80 characters"):
        load("shakespeare", tmp_path)
