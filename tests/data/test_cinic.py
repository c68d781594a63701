"""CINIC-10's folders of PNG files."""

import os
import sys

import numpy as np
import pytest
from PIL import Image

from fedpara.data import load
from fedpara.data.readers.cinic import CLASSES
from fedpara.errors import DataError, MissingExtraError


@pytest.fixture
def folder(tmp_path):
    """Two images per class in train, one in test; those of the ninth class are grey."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 2), ("test", 1)):
        for kind in CLASSES:
            place = tmp_path / "CINIC-10" / part / kind
            place.mkdir(parents=True)
            for number in range(count):
                shape = (32, 32) if kind == "ship" else (32, 32, 3)
                pixels = rng.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"n{number}.png")
    return tmp_path / "CINIC-10"


def test_reads_the_pixels_in_class_order(folder):
    train, test = load("cinic10", folder.parent)
    assert (len(train), len(test), train.shape) == (20, 10, (3, 32, 32))
    assert train.targets.tolist() == [label for label in range(10) for _ in range(2)]
    with Image.open(folder / "train/bird/n1.png") as image:
        assert train.inputs[5].numpy().tolist() == np.asarray(image).transpose(2, 0, 1).tolist()
    grey = test.inputs[8]
    assert grey[0].equal(grey[1])
    assert grey[1].equal(grey[2])


def test_a_new_file_invalidates_the_cache(folder):
    load("cinic10", folder.parent)
    (folder / "train/cat/extra.png").write_bytes((folder / "train/cat/n0.png").read_bytes())
    os.utime(folder / "train/cat", ns=(1, 1))
    train, _ = load("cinic10", folder.parent)
    assert len(train) == 21


@pytest.mark.parametrize("content", [b"", b"not a png", "cut"])
def test_a_damaged_image_is_named(folder, content):
    path = folder / "test/frog/n0.png"
    path.write_bytes(path.read_bytes()[:600] if content == "cut" else content)
    with pytest.raises(DataError, match="could not be read") as error:
        load("cinic10", folder.parent)
    assert str(path) in str(error.value)


def test_another_size_is_rejected(folder):
    Image.new("RGB", (31, 32)).save(folder / "train/deer/n0.png")
    with pytest.raises(DataError, match=r"deer/n0\.png could not be read .*31 x 32 pixels: expected 32 x 32"):
        load("cinic10", folder.parent)


def test_a_missing_class_folder_is_named(folder):
    (folder / "test/dog/n0.png").unlink()
    (folder / "test/dog").rmdir()
    with pytest.raises(DataError, match="CINIC-10 lacks test/dog"):
        load("cinic10", folder.parent)


def test_empty_folders_are_rejected(folder):
    for path in folder.glob("test/*/*.png"):
        path.unlink()
    with pytest.raises(DataError, match=r"test has no images: expected \*\.png files"):
        load("cinic10", folder.parent)


def test_without_pillow_the_error_names_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="pip install pillow"):
        load("cinic10", folder.parent)
