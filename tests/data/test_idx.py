"""idx files, packed and not, in each of the folders they are found in."""

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
    assert train.labels.tolist() == truth["train-labels-idx1-ubyte"].tolist()
    assert test.inputs[:, 0].numpy().tolist() == truth["t10k-images-idx3-ubyte"].tolist()
    assert test.labels.tolist() == truth["t10k-labels-idx1-ubyte"].tolist()
    assert (train.classes, train.shape, len(train), len(test)) == (10, (1, 5, 4), 6, 4)


def damaged(tmp_path, write_idx, name, change, packed=False):
    write_idx(tmp_path / "MNIST/raw", packed=packed)
    path = tmp_path / "MNIST/raw" / name
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content[:-1], r"header announces 6 x 5 x 4 = 136 bytes, found 135"),
        (lambda content: content + b"\0", r"= 136 bytes, found 137"),
        (lambda content: content[:9], r"found 9"),
        (lambda content: b"\0\0\x08\x01" + content[4:], r"expected the magic 0x00000803, found 0x00000801"),
        (lambda content: b"", r"expected the magic 0x00000803, found 0x\."),
        (lambda content: content[:4] + b"\xff" * 12 + content[16:], r"4294967295 x 4294967295 x 4294967295"),
    ],
)
def test_damage_is_named_with_what_was_expected(tmp_path, write_idx, change, words):
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


def test_a_flipped_byte_in_a_gzip_file_is_seen(tmp_path, write_idx):
    middle = 40
    path = damaged(
        tmp_path,
        write_idx,
        "train-images-idx3-ubyte.gz",
        lambda content: content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        packed=True,
    )
    with pytest.raises(DataError, match=r"is damaged") as error:
        load("mnist", tmp_path)
    assert str(path) in str(error.value)


def test_images_without_labels_are_refused(tmp_path, write_idx):
    write_idx(tmp_path / "MNIST/raw")
    labels = tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte"
    labels.write_bytes(bytes((0, 0, 8, 1, 0, 0, 0, 3, 1, 2, 3)))
    with pytest.raises(DataError, match="has 4 images: expected as many as the 3 labels"):
        load("mnist", tmp_path)


def test_verify_sees_that_files_are_not_the_publishers(tmp_path, write_idx):
    write_idx(tmp_path / "MNIST/raw", packed=True)
    report = verify("mnist", tmp_path)
    assert not report.ok
    assert report.examples == (6, 4)
    assert any("(60000, 10000) were published" in problem for problem in report.problems)
    assert sum("expected the MD5" in problem for problem in report.problems) == report.checked == 4


def test_the_label_bytes_are_labels(tmp_path, write_idx):
    """A label file and an image file swapped by name are told apart by their magic."""
    write_idx(tmp_path / "MNIST/raw", packed=True)
    folder = tmp_path / "MNIST/raw"
    content = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="expected the magic 0x00000801, found 0x00000803"):
        load("mnist", tmp_path)
    assert np.frombuffer(content[:4], ">u4")[0] == 0x803
