"""Names, the data folder, missing sets, digits, and the cache."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedpara.data import data_folder, load, names, prepare, status, verify
from fedpara.errors import ConfigError, DataError, MissingExtraError

CACHE = "fedpara-cache/mnist.safetensors"


def same(a, b):
    return all(x.inputs.equal(y.inputs) and x.targets.equal(y.targets) for x, y in zip(a, b, strict=True))


def test_the_names():
    published = {"cifar10", "cifar100", "cinic10", "mnist", "fashion-mnist", "femnist", "shakespeare"}
    published |= {"shakespeare-100", "shakespeare-100-mixed"}
    assert names()[0] == "digits"
    assert set(names()) == {"digits"} | published


@pytest.mark.parametrize(
    ("wrong", "right"), [("cifar-10", "cifar10"), ("minst", "mnist"), ("digit", "digits")]
)
@pytest.mark.parametrize("function", [load, status, prepare, verify])
def test_an_unknown_name_suggests_the_closest(function, wrong, right):
    with pytest.raises(ConfigError, match=f"Did you mean '{right}'.* Known: digits, cifar10"):
        function(wrong)


def test_an_unknown_name_lists_the_known_names():
    with pytest.raises(ConfigError, match=r"no data set is called 'zzz'\. Known: digits"):
        load("zzz")


def test_the_data_folder_is_the_argument_or_the_variable_or_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPARA_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert data_folder("~/sets") == tmp_path / "home/sets"
    assert data_folder() == tmp_path / "variable"
    monkeypatch.delenv("FEDPARA_DATA")
    assert data_folder() == tmp_path / "xdg/fedpara"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == tmp_path / "home/.cache/fedpara"


@pytest.mark.parametrize(
    ("name", "file", "publisher"),
    [
        ("cifar10", "cifar-10-batches-bin/{data_batch_1.bin,", "cs.toronto.edu"),
        ("cifar100", "cifar-100-python.tar.gz", "cs.toronto.edu"),
        ("cinic10", "CINIC-10/{train,test}", "datashare.ed.ac.uk"),
        ("mnist", "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]", "lecun"),
        ("fashion-mnist", "FashionMNIST/raw", "zalandoresearch"),
        ("femnist", "femnist/{train,test}.json", "TalwalkarLab/leaf"),
        ("shakespeare", "shakespeare/by_play_and_character/*.txt", "TalwalkarLab/leaf"),
    ],
)
def test_a_missing_set_names_its_files_folder_and_publisher(tmp_path, name, file, publisher):
    with pytest.raises(DataError) as error:
        load(name, tmp_path)
    for words in (f"{name} is not in {tmp_path}", file, publisher, "FEDPARA_DATA"):
        assert words in str(error.value)
    assert not status(name, tmp_path).present
    assert verify(name, tmp_path).problems == (str(error.value),)
    assert list(tmp_path.iterdir()) == []


def test_digits_are_scikit_learns_split_by_class():
    from sklearn.datasets import load_digits

    truth = load_digits()
    train, test = load("digits")
    assert (len(train), len(test), train.shape, train.classes) == (1438, 359, (1, 8, 8), 10)
    together = torch.cat([train.inputs, test.inputs]).double().numpy()[:, 0] * 16 / 255
    labels = torch.cat([train.targets, test.targets]).numpy()
    flat = np.column_stack([labels, np.rint(together).reshape(len(labels), -1)])
    expected = np.column_stack([truth.target, truth.images.reshape(len(truth.target), -1)])
    assert sorted(map(tuple, flat.tolist())) == sorted(map(tuple, expected.tolist()))
    assert np.abs(together - np.rint(together)).max() < 0.05
    held_out = torch.bincount(test.targets, minlength=10) / torch.bincount(
        torch.from_numpy(labels), minlength=10
    )
    assert ((held_out - 0.2).abs() < 0.005).all()
    assert same((train, test), load("digits"))


def test_digits_need_no_folder_and_no_heavy_import(tmp_path):
    program = "import sys; from fedpara import data; data.load('digits'); print('sklearn' in sys.modules)"
    environment = os.environ | {"FEDPARA_DATA": str(tmp_path / "nowhere")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
    assert not (tmp_path / "nowhere").exists()
    assert verify("digits").ok
    assert prepare("digits").examples == (1438, 359)


def test_status_and_prepare(tmp_path, write_idx):
    write_idx(tmp_path / "MNIST/raw")
    before = status("mnist", tmp_path)
    assert (before.present, before.path, before.examples, before.cache) == (
        True,
        tmp_path / "MNIST/raw",
        None,
        None,
    )
    prepared = prepare("mnist", tmp_path)
    assert (prepared.examples, prepared.cache, prepared.note) == ((6, 4), tmp_path / CACHE, "")
    assert status("mnist", tmp_path) == prepared


def test_the_second_load_comes_from_the_cache(tmp_path, write_idx):
    write_idx(tmp_path / "MNIST/raw")
    first = load("mnist", tmp_path)
    images = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    times = images.stat()
    images.write_bytes(images.read_bytes()[:16] + bytes(times.st_size - 16))
    os.utime(images, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert same(load("mnist", tmp_path), first)
    assert any("differs from its source" in problem for problem in verify("mnist", tmp_path).problems)


@pytest.mark.parametrize("what", ["time", "size", "other"])
def test_a_changed_source_is_read_again(tmp_path, write_idx, what):
    write_idx(tmp_path / "MNIST/raw")
    first = load("mnist", tmp_path)
    image_file = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    times = image_file.stat()
    write_idx(tmp_path / "MNIST/raw", train=9 if what == "size" else 6, seed=1)
    ahead = 1_000_000_000 if what == "time" else 0
    for path in (tmp_path / "MNIST/raw").iterdir():
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + ahead))
    if what == "other":
        for path in (tmp_path / "MNIST/raw").iterdir():
            path.rename(tmp_path / "MNIST" / path.name)
    second = load("mnist", tmp_path)
    assert not (len(first[0]) == len(second[0]) and same(first, second))
    assert same(load("mnist", tmp_path), second)


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "label"])
def test_a_damaged_cache_is_made_again(tmp_path, write_idx, damage):
    truth = write_idx(tmp_path / "MNIST/raw")
    load("mnist", tmp_path)
    path = tmp_path / CACHE
    content = path.read_bytes()
    label_bytes = truth["t10k-labels-idx1-ubyte"].astype("<i8").tobytes()
    assert content.count(label_bytes) == 1
    path.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "empty": b"",
            "noise": os.urandom(500),
            "label": content.replace(label_bytes, b"\xff" * len(label_bytes)),
        }[damage]
    )
    _, test = load("mnist", tmp_path)
    assert test.targets.tolist() == truth["t10k-labels-idx1-ubyte"].tolist()
    assert path.stat().st_size == len(content)
    assert verify("mnist", tmp_path).examples == (6, 4)
    assert not any("differs from its source" in problem for problem in verify("mnist", tmp_path).problems)


def test_a_set_loads_even_if_its_cache_cannot_be_written(tmp_path, write_idx):
    truth = write_idx(tmp_path / "MNIST/raw")
    (tmp_path / "fedpara-cache").write_text("a file where the cache folder would be")
    for _ in range(2):
        train, _ = load("mnist", tmp_path)
        assert train.targets.tolist() == truth["train-labels-idx1-ubyte"].tolist()
    prepared = prepare("mnist", tmp_path)
    assert prepared.cache is None
    assert prepared.examples == (6, 4)
    assert "could not be written" in prepared.note


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write into a read-only folder"
)
def test_a_set_in_a_read_only_folder_loads(tmp_path, write_idx):
    truth = write_idx(tmp_path / "MNIST/raw")
    tmp_path.chmod(0o555)
    try:
        train, _ = load("mnist", tmp_path)
        assert "could not be written" in prepare("mnist", tmp_path).note
    finally:
        tmp_path.chmod(0o755)
    assert train.targets.tolist() == truth["train-labels-idx1-ubyte"].tolist()


def test_a_data_folder_that_is_a_file_has_no_sets(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(DataError, match="mnist is not in"):
        load("mnist", file)


def test_a_hub_set_without_datasets_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[hub\]'"):
        load("hub:owner/name@v1")


@pytest.mark.parametrize("name", ["hub:owner/name", "hub:owner/name@"])
def test_a_hub_set_needs_a_revision(name):
    with pytest.raises(ConfigError, match="has no revision: append a commit or tag, as in hub:owner/name@v1"):
        load(name)


def test_the_revision_of_a_hub_set_is_passed_on(monkeypatch):
    asked = []

    def load_dataset(*words, **options):
        asked.append((words, options))
        return {"train": None}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match="has the parts train: expected train and test"):
        load("hub:owner/name@3f1c0de")
    assert asked == [(("owner/name",), {"revision": "3f1c0de"})]


@pytest.mark.skipif(find_spec("datasets") is None, reason="the hub extra (datasets) is not installed")
def test_hub_sets_become_examples(tmp_path, monkeypatch):
    import datasets

    from fedpara.data.readers import hub

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    pictures = [np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8) for i in range(3)]
    kinds = datasets.Features(
        {
            "img": datasets.Image(),
            "coarse": datasets.ClassLabel(num_classes=2),
            "fine": datasets.ClassLabel(num_classes=7),
        }
    )
    rows = {"img": pictures, "coarse": [0, 1, 0], "fine": [6, 0, 2]}
    part = datasets.Dataset.from_dict(rows, features=kinds)
    train, test = hub.examples(part, part.select([1]))
    assert (train.targets.tolist(), test.targets.tolist(), train.classes) == ([6, 0, 2], [0], 7)
    assert train.inputs.numpy().tolist() == [picture.transpose(2, 0, 1).tolist() for picture in pictures]
    with pytest.raises(DataError, match="expected an Image and a ClassLabel column"):
        hub.examples(part.remove_columns("img"), part)
    uneven = datasets.Dataset.from_dict(rows | {"img": [*pictures[:2], pictures[2][:4]]}, features=kinds)
    with pytest.raises(DataError, match="image 2 is uint8"):
        hub.examples(uneven, part)
