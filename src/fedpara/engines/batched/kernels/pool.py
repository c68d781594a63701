"""The average of a whole image as a mean: torch's adaptive pooling of channels-last images has no batching rule."""

from torch import Tensor, nn


class LanesAverage(nn.AdaptiveAvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return input.mean((-2, -1), keepdim=True)


def use_mean_pooling(model: nn.Module) -> nn.Module:
    """Turns, in place, every AdaptiveAvgPool2d to one pixel into this one."""
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
            module.__class__ = LanesAverage
    return model
