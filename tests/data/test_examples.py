"""Properties of Examples, their subsets, and normalise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.data import Examples, normalise
from fedpara.errors import DataError

IMAGES = torch.arange(4 * 2 * 3 * 3, dtype=torch.uint8).view(4, 2, 3, 3)
LABELS = torch.tensor([0, 2, 1, 2])


def test_holds_its_parts():
    examples = Examples(IMAGES, LABELS, 3, torch.tensor([5, 5, 9, 9]), (0.5, 0.4), (0.2, 0.1))
    assert len(examples) == 4
    assert examples.shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": LABELS[:3]}, r"targets are int64 \[3\]: expected 4 rows"),
        ({"targets": LABELS.int()}, r"targets are int32 \[4\] with 3 classes: expected int64"),
        ({"targets": torch.tensor([0, 1, 2, 3])}, "0 to 3: expected 0 to 2"),
        ({"targets": torch.tensor([0, 1, 2, -1])}, "-1 to 2: expected 0 to 2"),
        ({"mean": (0.5,), "std": (0.5,)}, "does not fit inputs"),
        ({"inputs": torch.zeros(4, 7), "mean": (0.5,), "std": (0.5,)}, "does not fit inputs"),
    ],
)
def test_parts_that_do_not_fit_are_rejected(change, words):
    with pytest.raises(DataError, match=words):
        Examples(**({"inputs": IMAGES, "targets": LABELS, "classes": 3} | change))


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.sampled_from(["list", "array", "tensor"]))
def test_a_subset_holds_the_rows_at_the_indices(rows, form):
    examples = Examples(IMAGES, LABELS, 3, torch.tensor([5, 6, 7, 8]), (0.5, 0.4), (0.2, 0.1))
    array = np.array(rows, dtype=np.int64)
    array.setflags(write=False)
    indices = {"list": rows, "array": array, "tensor": torch.from_numpy(array.copy())}[form]
    subset = examples.subset(indices)
    assert len(subset) == len(rows)
    assert (subset.classes, subset.mean, subset.std) == (examples.classes, examples.mean, examples.std)
    for position, row in enumerate(rows):
        assert torch.equal(subset.inputs[position], IMAGES[row])
        assert subset.targets[position] == LABELS[row]
        assert subset.owners is not None
        assert subset.owners[position] == 5 + row


@pytest.mark.parametrize("indices", [[4], [-1], [True, False, True, True], [0.5], [[0, 1]]])
def test_a_subset_rejects_bad_indices(indices):
    with pytest.raises(DataError, match="indices"):
        Examples(IMAGES, LABELS, 3).subset(indices)


def test_normalise_is_the_formula():
    mean, std = (0.5, 0.25), (0.2, 0.1)
    expected = (IMAGES.double().numpy() / 255 - np.reshape(mean, (2, 1, 1))) / np.reshape(std, (2, 1, 1))
    result = normalise(IMAGES, mean, std)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_floats_are_not_divided_by_255():
    images = torch.rand(4, 3, 8, 8)
    mean, std = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)
    shape = (3, 1, 1)
    expected = (images - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    assert torch.equal(normalise(images, mean, std), expected)


def test_without_a_mean_ids_become_int64_and_floats_stay():
    ids = torch.tensor([[3, 79]], dtype=torch.uint8)
    assert torch.equal(normalise(ids, None, None), torch.tensor([[3, 79]]))
    assert normalise(ids, None, None).dtype == torch.int64
    features = torch.randn(2, 3)
    assert torch.equal(normalise(features, None, None), features)


def test_a_mean_may_be_a_list_or_an_array():
    expected = normalise(IMAGES, (0.5, 0.25), (0.5, 0.25))
    assert torch.equal(normalise(IMAGES, [0.5, 0.25], np.array([0.5, 0.25])), expected)
