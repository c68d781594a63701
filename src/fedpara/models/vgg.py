"""VGG16 for 32x32 images, with GroupNorm instead of BatchNorm and a 512-512-C head (appendix C.2, gamma table).

15,253,578 parameters for 10 classes and 15,299,748 for 100.
"""

from collections import OrderedDict

from torch import nn

from fedpara.models.init import he_convolutions

STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Widths of the convolutions, as multiples of the first."""


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
    pooling before the head. `width` is the width of the first stage; the others are 2, 4 and 8 times as wide, and
    `groups` must divide it. `bias=False` removes the bias of the convolutions: the norm behind them removes the scale
    of W, but a bias next to a small W soon outweighs it.
    """
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
