"""A small convolutional net for 8x8 to 32x32 images: widths 64-64-128-128, GroupNorm, global average, linear.

It is not in the paper. Demos and tests use it because a CPU trains it in seconds: five epochs of SGD (lr 0.05,
batch 16) reach about 98% on scikit-learn's digits.
"""

from collections import OrderedDict

from torch import nn

from fedpara.models.init import he_convolutions

WIDTHS = (64, 64, 128, 128)
GROUPS = 8


def cnn(classes: int = 10, channels: int = 1, size: int = 8) -> nn.Sequential:
    """[B, channels, size, size] to [B, classes]; children `features` and `classifier`.

    Pooling halves the image after each convolution until its sides are 2 or 3.
    """
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
