"""Generated sets have the shape, classes and owners of the real ones, and are always the same."""

import pytest
import torch

from fedpara import data
from fedpara.data.readers.generated import KINDS
from fedpara.errors import ConfigError


@pytest.mark.parametrize("name", KINDS)
def test_it_has_the_shape_of_the_real_set(name):
    train, test = data.load(f"generated:{name}")
    kind = KINDS[name]
    for part in (train, test):
        assert part.shape == kind.shape
        assert part.classes == kind.classes
        assert (part.owners is not None) == (kind.owners > 0)
    assert (train.mean is None) == (len(kind.shape) == 1)
    if kind.owners:
        assert set(test.owners.tolist()) == set(train.owners.tolist()) == set(range(kind.owners))
    again, _ = data.load(f"generated:{name}")
    assert torch.equal(train.inputs, again.inputs)
    assert torch.equal(train.targets, again.targets)


def test_an_unknown_name_lists_the_known_names():
    with pytest.raises(ConfigError, match="no generated set is called 'imagenet': known: cifar10"):
        data.load("generated:imagenet")
