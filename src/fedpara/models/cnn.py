"""A small convolutional net for 8x8 to 32x32 images: widths 64-64-128-128, GroupNorm, global average, linear.

Not in the paper: it is for demos and tests, which a CPU must train in seconds. Five epochs of SGD (lr 0.05,
batch 16) bring it to about 98% on scikit-learn's digits.
"""

from collections import OrderedDict

from torch import nn

from fedpara.errors import ConfigError
from fedpara.models.init import he_convolutions

WIDTHS = (64, 64, 128, 128)
GROUPS = 8


def cnn(classes: int = 10, channels: int = 1, size: int = 8) -> nn.Sequential:
    """[B, channels, size, size] to [B, classes]; children `features` and `classifier`.

    The map is halved after each convolution, down to 2 or 3 on a side and no further.
    """
    if size < 2:
        raise ConfigError(f"cnn for images of {size} on a side: expected 2 or more.")
    features: list[nn.Module] = []
    inputs = channels
    for width in WIDTHS:
        features += [nn.Conv2d(inputs, width, 3, padding=1), nn.GroupNorm(GROUPS, width), nn.ReLU()]
        inputs = width
        if size > 3:
            features.append(nn.MaxPool2d(2))
            size //= 2
    model = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(inputs, classes),
        )
    )
    he_convolutions(model)
    return model
