"""LEAF's Shakespeare preprocessing, compared with a version that makes one window at a time."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.data import load
from fedpara.data.readers.shakespeare import ALL_LETTERS, build_apart, build_mixed, encode
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


def arrays_of(texts):
    ids = [torch.tensor(list(encode(text)), dtype=torch.uint8) for text in texts]
    return {"text": torch.cat(ids), "lengths": torch.tensor([len(one) for one in ids])}


def decoded(examples):
    rows = ["".join(ALL_LETTERS[i] for i in row) for row in examples.inputs.tolist()]
    return list(zip(rows, [ALL_LETTERS[i] for i in examples.targets.tolist()], strict=True))


def test_a_clients_training_and_test_windows_share_no_character():
    texts = [ALL_LETTERS[1:] * 4, "ab" * 50, ALL_LETTERS[1:] * 8, ALL_LETTERS[1:] * 9]
    train, test = build_apart(arrays_of(texts), 80, clients=2, train=120, test=5)
    assert train.owners.tolist() == [2] * 120 + [3] * 120, "the first role has too few windows"
    assert test.owners.tolist() == [2] * 5 + [3] * 5
    for part, role in enumerate((2, 3)):
        all_windows = windows(texts[role])
        cut = int(0.8 * len(all_windows))
        assert decoded(train)[120 * part : 120 * (part + 1)] == all_windows[:120]
        assert decoded(test)[5 * part : 5 * (part + 1)] == all_windows[cut + 79 : cut + 84]
        last, first = 119 + 80, cut + 79  # the last character trained on, the first one tested on
        assert last < first
    with pytest.raises(DataError, match="2 roles have 120 training and 5 test windows: expected 3"):
        build_apart(arrays_of(texts), 80, clients=3, train=120, test=5)


def test_mixed_windows_are_drawn_from_all_text_and_then_split():
    texts = [line(300, 0), line(250, 1)]
    train, test = build_mixed(arrays_of(texts), 80, clients=4, train=40, test=10)
    assert (len(train), len(test)) == (160, 40)
    every = [(*window, role) for role, text in enumerate(texts) for window in windows(text)]
    drawn = [
        (*window, owner)
        for part in (train, test)
        for window, owner in zip(decoded(part), part.owners.tolist(), strict=True)
    ]
    assert len(set(drawn)) == len(drawn), "without replacement"
    assert set(drawn) <= set(every)
    assert {owner for *_, owner in drawn} == {0, 1}
    with pytest.raises(DataError, match=r"the roles have \d+ windows: expected 5000"):
        build_mixed(arrays_of(texts), 80, clients=100, train=40, test=10)
