"""Global average pooling as a mean, compared with torch's pooling."""

import pytest
import torch
from torch import nn

from fedpara.engines.batched.kernels.pool import LanesAverage, use_mean_pooling


@pytest.mark.parametrize("size", [1, (1, 1)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_same_numbers_and_gradients_as_torchs(size, layout):
    x = torch.randn(3, 8, 5, 4).to(memory_format=layout).requires_grad_()
    pool = use_mean_pooling(nn.Sequential(nn.AdaptiveAvgPool2d(size)))
    assert type(pool[0]) is LanesAverage
    both = [f(x) for f in (pool, nn.AdaptiveAvgPool2d(size))]
    assert torch.equal(*both)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in both))


def test_other_output_sizes_and_other_layers_stay():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.AdaptiveAvgPool2d((1, 2)), nn.AdaptiveMaxPool2d(1))
    assert LanesAverage not in {type(layer) for layer in use_mean_pooling(model)}
