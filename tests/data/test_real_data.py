"""Golden: the published sets, if FEDPARA_DATA is a folder that has them."""

import os
import shutil

import numpy as np
import pytest
import torch
from published_pickle import as_published

from fedpara.data import by_owner, load, shards, status, verify
from fedpara.data.readers import cifar
from fedpara.errors import DataError

pytestmark = pytest.mark.data


def need(name):
    if not os.environ.get("FEDPARA_DATA") or not status(name).present:
        pytest.skip(f"{name} is missing: set FEDPARA_DATA to a folder that has it")


def test_cifar10_has_the_published_statistics():
    need("cifar10")
    train, test = load("cifar10")
    assert torch.bincount(train.targets).tolist() == [5000] * 10
    assert torch.bincount(test.targets).tolist() == [1000] * 10
    assert train.shape == (3, 32, 32)
    np.testing.assert_allclose(train.mean, (0.49139968, 0.48215841, 0.44653091), atol=5e-9)
    np.testing.assert_allclose(train.std, (0.24703223, 0.24348513, 0.26158784), atol=5e-9)
    assert train.targets[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]


def test_the_python_version_of_cifar10_equals_the_binary_version(tmp_path):
    """The records of the binary version, pickled as the publisher does."""
    need("cifar10")
    folder = status("cifar10").path
    if folder is None or folder.name != cifar.CIFAR10_BINARY.folder:
        pytest.skip("the binary version of cifar10 is missing")
    (tmp_path / cifar.CIFAR10_PYTHON.folder).mkdir()
    for old, new in zip(cifar.CIFAR10_BINARY.names, cifar.CIFAR10_PYTHON.names, strict=True):
        table = np.fromfile(folder / old, np.uint8).reshape(10_000, 3073)
        content = as_published(np.ascontiguousarray(table[:, 1:]), table[:, 0].tolist())
        (tmp_path / cifar.CIFAR10_PYTHON.folder / new).write_bytes(content)
    for ours, theirs in zip(load("cifar10", tmp_path), load("cifar10"), strict=True):
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours.targets, theirs.targets)


def test_mnist_has_the_published_counts():
    need("mnist")
    train, test = load("mnist")
    assert torch.bincount(train.targets).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert (len(test), train.shape) == (10_000, (1, 28, 28))
    assert train.mean is not None
    assert train.std is not None
    assert (round(train.mean[0], 4), round(train.std[0], 4)) == (0.1307, 0.3081)
    clients = shards(train.targets, 100, seed=0)
    assert max(len(train.targets[torch.from_numpy(c.copy())].unique()) for c in clients) == 2


def test_mnist_is_not_taken_for_fashion_mnist(tmp_path):
    need("mnist")
    folder = status("mnist").path
    assert folder is not None
    for path in folder.glob("t*-ubyte*"):
        shutil.copy(path, tmp_path)
    assert len(load("mnist", tmp_path)[0]) == 60_000
    with pytest.raises(DataError, match="is mnist, not fashion-mnist"):
        load("fashion-mnist", tmp_path)


def test_shakespeare_has_leafs_counts():
    need("shakespeare")
    train, test = load("shakespeare")
    assert len(train) + len(test) == 4_226_158
    assert train.owners is not None
    assert len(by_owner(train.owners)) == 1_129
    assert train.inputs.dtype == torch.uint8
    assert train.shape == (80,)


def test_femnist_has_its_writers():
    need("femnist")
    train, test = load("femnist")
    assert train.classes == 62
    assert train.owners is not None
    assert test.owners is not None
    clients = by_owner(train.owners)
    assert len(by_owner(test.owners, roster=train.owners)) == len(clients)
    assert int(clients.sizes.sum()) == len(train)


@pytest.mark.parametrize("name", ["cifar10", "mnist", "shakespeare"])
def test_the_files_are_the_publishers(name):
    need(name)
    report = verify(name)
    assert report.ok, report.problems
    if name != "shakespeare":
        assert report.checked == report.files
