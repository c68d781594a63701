"""FEMNIST in LEAF's JSON, as two files or many."""

import json

import numpy as np
import pytest

from fedpara.data import load, verify
from fedpara.errors import DataError

WHITE = [1.0] * 784
INK = [0.0] * 392 + [0.5] * 392


def leaf(users):
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
    )


def write(root, train, test):
    for folder in ("femnist/data/train", "femnist/data/test"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for part, files in (("train", train), ("test", test)):
        for number, users in enumerate(files):
            (root / f"femnist/data/{part}/all_data_{number}.json").write_text(leaf(users))


TRAIN = {"f01": ([WHITE, INK], [0, 61]), "f02": ([INK], [10])}
TEST = {"f02": ([WHITE], [11]), "f01": ([], [])}


def test_two_files_are_read(tmp_path):
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist/train.json").write_text(leaf(TRAIN))
    (tmp_path / "femnist/test.json").write_text(leaf(TEST))
    train, test = load("femnist", tmp_path)
    assert (train.classes, train.shape) == (62, (1, 28, 28))
    assert train.targets.tolist() == [0, 61, 10]
    assert train.owners.tolist() == [0, 0, 1]
    assert (test.targets.tolist(), test.owners.tolist()) == ([11], [1])
    assert train.inputs[0].unique().tolist() == [255]
    assert train.inputs[1].flatten().tolist() == [0] * 392 + [128] * 392


@pytest.mark.parametrize(("train", "test"), [({}, {}), (TRAIN, {}), ({}, TEST)])
def test_a_part_without_examples_is_a_problem(tmp_path, train, test):
    write(tmp_path, [train], [test])
    report = verify("femnist", tmp_path)
    assert not report.ok
    assert "expected some of each" in " ".join(report.problems)
    write(tmp_path, [TRAIN], [TEST])
    assert verify("femnist", tmp_path).ok


def test_many_files_number_their_writers_across_files(tmp_path):
    write(tmp_path, [TRAIN, {"f07": ([WHITE], [3])}], [TEST, {"f07": ([INK], [3]), "f99": ([INK], [4])}])
    train, test = load("femnist", tmp_path)
    assert train.owners.tolist() == [0, 0, 1, 2]
    assert test.owners.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(train.targets, [0, 61, 10, 3])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (leaf(TRAIN)[:-40], "could not be read .JSONDecodeError"),
        ("", "could not be read .JSONDecodeError"),
        ("[" * 100_000, "could not be read .RecursionError"),
        ("[1, 2]", "could not be read"),
        (json.dumps({"users": ["a"], "user_data": {}}), "could not be read"),
        (leaf({"a": ([WHITE], [1, 2])}), "1 images and labels"),
        (leaf({"a": ([WHITE[:5]], [1])}), "could not be read"),
        (leaf({"a": ([[2.0] * 784], [1])}), "pixels run from 2.0 to 2.0"),
        (leaf({"a": ([[10**400, *WHITE[1:]]], [1])}), "could not be read .OverflowError"),
        (leaf({"a": ([[float("nan")] * 784], [1])}), "pixels run from nan"),
        (leaf({"a": ([WHITE], [62])}), "targets run from 62 to 62: expected 0 to 61"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, words):
    write(tmp_path, [{}], [TEST])
    (tmp_path / "femnist/data/train/all_data_0.json").write_text(content)
    with pytest.raises(DataError, match=words) as error:
        load("femnist", tmp_path)
    assert str(tmp_path / "femnist/data") in str(error.value)
    assert not (tmp_path / "fedpara-cache").exists()


def test_train_without_test_is_incomplete(tmp_path):
    write(tmp_path, [TRAIN], [])
    with pytest.raises(DataError, match=r"femnist is incomplete: .*femnist/data lacks test/\*\.json"):
        load("femnist", tmp_path)
