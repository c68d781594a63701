"""idx files, packed or plain, in each folder where they may be."""

import gzip

import numpy as np
import pytest

from fedpara.data import load, verify
from fedpara.errors import DataError


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST/raw"),
        ("mnist", "mnist"),
        ("mnist", "."),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "."),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_reads_what_was_written(tmp_path, write_idx, name, folder, packed):
    truth = write_idx(tmp_path / folder, packed=packed)
    train, test = load(name, tmp_path)
    assert train.inputs[:, 0].numpy().tolist() == truth["train-images-idx3-ubyte"].tolist()
    assert train.targets.tolist() == truth["train-labels-idx1-ubyte"].tolist()
    assert test.inputs[:, 0].numpy().tolist() == truth["t10k-images-idx3-ubyte"].tolist()
    assert test.targets.tolist() == truth["t10k-labels-idx1-ubyte"].tolist()
    assert (train.classes, train.shape, len(train), len(test)) == (10, (1, 5, 4), 6, 4)


def damaged(tmp_path, write_idx, name, change, packed=False):
    write_idx(tmp_path / "MNIST/raw", packed=packed)
    path = tmp_path / "MNIST/raw" / name
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content[:-1], r"array of size 119 into shape \(6,5,4\)"),
        (lambda content: content + b"\0", r"array of size 121 into shape \(6,5,4\)"),
        (lambda content: content[:8], "could not be read"),
        (lambda content: content[:9], "could not be read"),
        (lambda content: content[:16], "could not be read"),
        (lambda content: b"\0\0\x08\x01" + content[4:], "it starts with 0x00000801: expected 0x00000803"),
        (lambda content: b"", "it starts with 0x: expected 0x00000803"),
        (lambda content: content[:4] + b"\xff" * 12 + content[16:], "could not be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, write_idx, change, words):
    path = damaged(tmp_path, write_idx, "train-images-idx3-ubyte", change)
    with pytest.raises(DataError, match=words) as error:
        load("mnist", tmp_path)
    assert str(path) in str(error.value)
    assert not (tmp_path / "fedpara-cache").exists()


@pytest.mark.parametrize(
    "change", [lambda content: content[:-9], lambda content: b"no gzip", lambda content: b""]
)
def test_a_damaged_gzip_file_is_named(tmp_path, write_idx, change):
    path = damaged(tmp_path, write_idx, "t10k-labels-idx1-ubyte.gz", change, packed=True)
    with pytest.raises(DataError) as error:
        load("mnist", tmp_path)
    assert str(path) in str(error.value)


def test_a_flipped_byte_in_a_gzip_file_is_detected(tmp_path, write_idx):
    middle = 40
    path = damaged(
        tmp_path,
        write_idx,
        "train-images-idx3-ubyte.gz",
        lambda content: content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        packed=True,
    )
    with pytest.raises(DataError, match="could not be read") as error:
        load("mnist", tmp_path)
    assert str(path) in str(error.value)


def test_images_without_labels_are_rejected(tmp_path, write_idx):
    write_idx(tmp_path / "MNIST/raw")
    labels = tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte"
    labels.write_bytes(bytes((0, 0, 8, 1, 0, 0, 0, 3, 1, 2, 3)))
    with pytest.raises(DataError, match=r"is damaged: targets are int64 \[3\]: expected 4 rows"):
        load("mnist", tmp_path)


def test_verify_compares_checksums_and_counts(tmp_path, write_idx):
    write_idx(tmp_path / "MNIST/raw", packed=True)
    report = verify("mnist", tmp_path)
    assert not report.ok
    assert report.examples == (6, 4)
    assert any("(60000, 10000) were published" in problem for problem in report.problems)
    assert sum("expected the MD5" in problem for problem in report.problems) == report.checked == 4


def test_images_under_the_name_of_labels_are_rejected(tmp_path, write_idx):
    """Images and labels start with different bytes."""
    write_idx(tmp_path / "MNIST/raw", packed=True)
    folder = tmp_path / "MNIST/raw"
    content = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="it starts with 0x00000803: expected 0x00000801"):
        load("mnist", tmp_path)
    assert np.frombuffer(content[:4], ">u4")[0] == 0x803
