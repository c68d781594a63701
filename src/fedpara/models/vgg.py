"""VGG16 for 32x32 images, GroupNorm for BatchNorm, head 512-512-C (appendix C.2, Table of gamma).

15,253,578 parameters for 10 classes and 15,299,748 for 100.
"""

from collections import OrderedDict

from torch import nn

from fedpara.errors import ConfigError
from fedpara.models.init import he_convolutions

STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Widths of the convolutions, in units of the first one's."""


def vgg16(
    classes: int = 10,
    groups: int = 32,
    dropout: float = 0.5,
    channels: int = 3,
    width: int = 64,
    bias: bool = True,
) -> nn.Sequential:
    """[B, channels, 32, 32] to [B, classes]; children `features`, `flatten`, `classifier`.

    The layout of the features is torchvision's `vgg16_bn`. Five halvings leave 512x1x1, so there is no
    pooling before the head. `width` is that of the first stage, and the others are 2, 4 and 8 times as wide. Without
    `bias` a convolution has none: the norm behind it takes W at any scale, but a bias beside a small W soon outweighs
    it.
    """
    if groups < 1 or width % groups:
        raise ConfigError(f"vgg16 with {groups} groups: expected a divisor of {width}, its narrowest width.")
    features: list[nn.Module] = []
    inputs = channels
    for stage in STAGES:
        for times in stage:
            outputs = times * width
            conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
            features += [conv, nn.GroupNorm(groups, outputs), nn.ReLU()]
            inputs = outputs
        features.append(nn.MaxPool2d(2))
    head = [
        nn.Dropout(dropout),
        nn.Linear(inputs, inputs),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(inputs, inputs),
        nn.ReLU(),
        nn.Linear(inputs, classes),
    ]
    model = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            flatten=nn.Flatten(),
            classifier=nn.Sequential(*head),
        )
    )
    he_convolutions(model)
    return model
