"""Properties: what an Examples accepts, its subsets, and normalise."""

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
        ({"labels": LABELS[:3]}, "one int64 label an example"),
        ({"labels": LABELS.int()}, "one int64 label an example"),
        ({"labels": torch.tensor([0, 1, 2, 3])}, "0 to 3: expected 0 to 2"),
        ({"labels": torch.tensor([0, 1, 2, -1])}, "-1 to 2: expected 0 to 2"),
        ({"owners": torch.tensor([1, 2])}, "owners are int64"),
        ({"mean": (0.5, 0.5)}, "come together"),
        ({"mean": (0.5,), "std": (0.5,)}, "do not fit"),
        ({"mean": (0.5, 0.5), "std": (0.5, 0.0)}, "positive std"),
    ],
)
def test_refuses_parts_that_do_not_fit(change, words):
    with pytest.raises(DataError, match=words):
        Examples(**({"inputs": IMAGES, "labels": LABELS, "classes": 3} | change))


@pytest.mark.parametrize("part", ["inputs", "labels"])
def test_arrays_and_lists_are_no_tensors(part):
    parts = {"inputs": torch.zeros(3, 2), "labels": torch.zeros(3, dtype=torch.int64)}
    for wrong in (parts[part].numpy(), parts[part].tolist()):
        with pytest.raises(DataError, match=rf"{part} are a (ndarray|list): expected a tensor"):
            Examples(**{**parts, part: wrong}, classes=1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.sampled_from(["list", "array", "tensor"]))
def test_a_subset_is_the_rows_at_the_indices(rows, form):
    examples = Examples(IMAGES, LABELS, 3, torch.tensor([5, 6, 7, 8]), (0.5, 0.4), (0.2, 0.1))
    array = np.array(rows, dtype=np.int64)
    array.setflags(write=False)
    indices = {"list": rows, "array": array, "tensor": torch.from_numpy(array.copy())}[form]
    subset = examples.subset(indices)
    assert len(subset) == len(rows)
    assert (subset.classes, subset.mean, subset.std) == (examples.classes, examples.mean, examples.std)
    for position, row in enumerate(rows):
        assert torch.equal(subset.inputs[position], IMAGES[row])
        assert subset.labels[position] == LABELS[row]
        assert subset.owners is not None
        assert subset.owners[position] == 5 + row


@pytest.mark.parametrize("indices", [[4], [-1], [True, False, True, True], [0.5], [[0, 1]]])
def test_a_subset_refuses_indices_that_name_no_row(indices):
    with pytest.raises(DataError, match="indices"):
        Examples(IMAGES, LABELS, 3).subset(indices)


def test_normalise_is_the_formula():
    mean, std = (0.5, 0.25), (0.2, 0.1)
    expected = (IMAGES.double().numpy() / 255 - np.reshape(mean, (2, 1, 1))) / np.reshape(std, (2, 1, 1))
    result = normalise(IMAGES, mean, std)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_floats_are_on_the_scale_of_a_mean_already():
    images = torch.rand(4, 3, 8, 8)
    mean, std = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)
    shape = (3, 1, 1)
    expected = (images - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    assert torch.equal(normalise(images, mean, std), expected)


def test_normalise_passes_ids_as_int64_and_leaves_features_alone():
    ids = torch.tensor([[3, 79]], dtype=torch.uint8)
    assert torch.equal(normalise(ids, None, None), torch.tensor([[3, 79]]))
    assert normalise(ids, None, None).dtype == torch.int64
    features = torch.randn(2, 3)
    assert torch.equal(normalise(features, None, None), features)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), None), (None, (0.5,))])
def test_a_mean_and_a_std_come_together(mean, std):
    with pytest.raises(DataError, match="come together"):
        normalise(torch.zeros(2, 1, 4, 4), mean, std)


def test_a_mean_is_a_number_a_channel():
    images = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 2
    assert Examples(*images, mean=[0.5], std=np.array([0.25])).std == (0.25,)
    for mean, std, said in ((0.5, 0.5, "mean is 0.5"), ([0.5], [float("nan")], "std is .*finite")):
        with pytest.raises(DataError, match=said):
            Examples(*images, mean=mean, std=std)
