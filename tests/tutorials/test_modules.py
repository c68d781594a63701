"""Properties of two tutorials' own code: padding of documents, and the weights under the adapters."""

import math

import pytest
import torch

from fedpara.tasks.losses import mean_loss, next_token


@pytest.mark.parametrize("tutorial", ["language_model"], indirect=True)
def test_padding_does_not_count(tutorial):
    """The uniform model has the size of the vocabulary as its perplexity, on documents of every length."""
    module = tutorial.module
    test = module.load(clients=3, documents=2).test
    uniform = torch.zeros(len(test), module.LENGTH, len(module.VOCABULARY))
    assert math.exp(mean_loss(next_token(uniform, test.targets))) == pytest.approx(len(module.VOCABULARY))
    assert len({int(n) for n in (test.targets >= 0).sum(1)}) == 5


@pytest.mark.parametrize("tutorial", ["adapters"], indirect=True)
def test_the_base_is_the_same_whatever_was_drawn_before(tutorial):
    """Both ends must have the same base, and each of them may have drawn numbers."""
    module = tutorial.module
    torch.manual_seed(1)
    first = module.pretrained().state_dict()
    module.weights.cache_clear()
    torch.rand(3)
    again = module.pretrained().state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
