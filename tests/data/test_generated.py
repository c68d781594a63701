"""Generated sets: the shape, classes and owners of what they stand in for, the same every time."""

import pytest
import torch

from fedpara import data
from fedpara.data.readers.generated import KINDS
from fedpara.errors import ConfigError


@pytest.mark.parametrize("name", KINDS)
def test_it_has_the_shape_of_the_set_it_stands_in_for(name):
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
    assert torch.equal(train.labels, again.labels)


def test_an_unknown_one_names_those_there_are():
    with pytest.raises(ConfigError, match="expected one of cifar10"):
        data.load("generated:imagenet")
