"""Contracts of FederatedData.of: every kind of source gives the same examples, and a wrong one is named."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from fedpara.data import Examples, FederatedData
from fedpara.data.convert import as_examples
from fedpara.errors import DataError

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 1, 0])


class Items(Dataset):
    """A map-style data set of the given items."""

    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Table:
    """What fedpara uses of an Arrow table."""

    def __init__(self, **columns):
        self.columns = columns

    def to_pylist(self):
        rows = zip(*self.columns.values(), strict=True)
        return [dict(zip(self.columns, row, strict=True)) for row in rows]


def memory_map(folder):
    mapped = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=X.dtype, shape=X.shape)
    mapped[:] = X
    return np.load(folder / "x.npy", mmap_mode="r"), Y


SOURCES = {
    "tensors": lambda folder: (torch.from_numpy(X), torch.from_numpy(Y)),
    "NumPy": lambda folder: (X, Y),
    "memory map": memory_map,
    "TensorDataset": lambda folder: TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "items of tensors": lambda folder: Items(
        (torch.from_numpy(x), int(y)) for x, y in zip(X, Y, strict=True)
    ),
    "items of arrays": lambda folder: Items(zip(X, Y, strict=True)),
    "items of lists": lambda folder: Items((x.tolist(), int(y)) for x, y in zip(X, Y, strict=True)),
    "dicts": lambda folder: Items({"x": x, "label": y} for x, y in zip(X, Y, strict=True)),
    "a list of pairs": lambda folder: list(zip(X, Y, strict=True)),
    "rows of a table": lambda folder: Table(x=X.tolist(), label=Y.tolist()),
    "Examples": lambda folder: Examples(torch.from_numpy(X), torch.from_numpy(Y)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_examples(kind, tmp_path):
    made = as_examples(SOURCES[kind](tmp_path))
    assert (made.inputs.dtype, made.targets.dtype) == (torch.float32, torch.int64)
    assert made.inputs.tolist() == X.tolist()
    assert made.targets.tolist() == Y.tolist()


@pytest.mark.parametrize("kind", SOURCES)
def test_a_federation_of_any_kind_holds_the_same_clients(kind, tmp_path):
    data = FederatedData.of([SOURCES[kind](tmp_path)] * 3, test=SOURCES[kind](tmp_path))
    assert len(data) == 3
    assert [data.size(i) for i in range(3)] == data.sizes.tolist() == [4, 4, 4]
    assert torch.equal(data.client(2).inputs, torch.from_numpy(X))
    assert torch.equal(data.test.targets, torch.from_numpy(Y))
    pool, rows, problems = data.pool([2, 0])
    assert not problems
    assert all(torch.equal(pool.inputs[rows[client]], torch.from_numpy(X)) for client in (0, 2))


def test_only_what_is_in_memory_is_joined(tmp_path):
    assert FederatedData.of([(X, Y), (torch.from_numpy(X), torch.from_numpy(Y))]).pooled
    assert not FederatedData.of([memory_map(tmp_path)]).pooled
    assert not FederatedData.of([Items(zip(X, Y, strict=True))]).pooled


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_an_arrow_table():
    import pyarrow

    made = as_examples(pyarrow.table({"x": X.tolist(), "label": Y.tolist()}))
    assert made.inputs.tolist() == X.tolist()
    assert made.targets.tolist() == Y.tolist()


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
def test_a_hugging_face_data_set():
    import datasets

    made = as_examples(datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}))
    assert made.inputs.tolist() == X.tolist()
    assert made.targets.tolist() == Y.tolist()


def test_items_of_several_inputs_keep_their_structure():
    made = as_examples(Items({"ids": [1, 2], "age": 0.5, "labels": 1.5} for _ in range(3)))
    assert {name: part.shape for name, part in made.inputs.items()} == {"ids": (3, 2), "age": (3,)}
    assert (made.inputs["ids"].dtype, made.inputs["age"].dtype) == (torch.int64, torch.float32)
    assert made.targets.dtype == torch.float32  # a Python float has no precision of its own
    pairs = as_examples(Items(((X[0], X[1]), {"mask": X, "y": 1}) for _ in range(2)))
    assert [part.shape for part in pairs.inputs] == [(2, 3), (2, 3)]
    assert {name: part.shape for name, part in pairs.targets.items()} == {"mask": (2, 4, 3), "y": (2,)}


def test_arrays_in_dicts_and_tuples():
    made = as_examples(({"a": X, "b": X[:, 0]}, (Y, X)))
    assert made.inputs["b"].shape == (4,)
    assert made.targets[1].shape == (4, 3)


def pad(items):
    ids = torch.full((len(items), 5), -100)
    for row, (tokens, _) in zip(ids, items, strict=True):
        row[: len(tokens)] = torch.as_tensor(tokens)
    return {"ids": ids.clamp(min=0), "mask": ids >= 0, "targets": ids}


def test_a_collate_pads_items_of_different_lengths():
    sources = [Items([([1, 2, 3], 0), ([4], 0)]), Items([([5] * 5, 0)])]
    data = FederatedData.of(sources, collate=pad)
    assert data.client(0).targets.tolist() == [[1, 2, 3, -100, -100], [4, -100, -100, -100, -100]]
    assert data.client(1).inputs["mask"].all()
    pool, _, _ = data.pool([0, 1])
    assert pool.inputs["ids"].shape == (3, 5)


def test_an_image_of_pillow_becomes_bytes():
    image = pytest.importorskip("PIL.Image")
    grey, colour = (image.new(mode, (4, 3)) for mode in ("L", "RGB"))
    assert as_examples(Items([(grey, 0)])).inputs.shape == (1, 1, 3, 4)
    made = as_examples(Items([(colour, 0)]), classes=2, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert (made.inputs.shape, made.inputs.dtype) == ((1, 3, 3, 4), torch.uint8)


class Failing(Items):
    def __getitem__(self, i):
        raise OSError("disk error\nin line 2")


WRONG = {
    "unequal lengths": (Items([([1, 2], 0), ([1], 0)]), "items differ in size .*give a `collate` that pads"),
    "text": (Items([("a film", 0), ("a book", 1)]), "text.*give a `collate` that turns them into tensors"),
    "no target": (Items([{"x": 1, "y": 2}]), "fields x, y: expected inputs and a target called target"),
    "only a target": (Items([{"label": 1}]), "fields label: expected inputs"),
    "a triple": (Items([(1, 2, 3)]), r"3 parts: expected \(input, target\)"),
    "no items": (Items([]), "empty"),
    "an iterator": (iter([(1, 2)]), "list_iterator: expected"),
    "a number": (3, "a client's data is int: expected"),
    "rows": ((X, Y[:3]), r"targets are int64 \[3\]: expected 4 rows"),
    "failing": (Failing([(1, 2), (1, 2)]), "^OSError: disk error$"),
    "missing values": (Items([(1.0, 1), (None, 1)]), "TypeError"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_source_is_one_sentence(kind):
    source, words = WRONG[kind]
    with pytest.raises(DataError, match=words) as caught:
        as_examples(source)
    assert "\n" not in str(caught.value)


def test_classes_are_checked():
    with pytest.raises(DataError, match="targets run from 0 to 1: expected 0 to 0"):
        as_examples((X, Y), classes=1)
