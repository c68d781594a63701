"""fc2(relu(fc1(x))): the two FC layers of the personalisation experiments (appendix C.2), 256-C.

784-256-62 has 216,894 parameters.
"""

from collections import OrderedDict

from torch import nn


def mlp(inputs: int = 784, hidden: int = 256, classes: int = 10) -> nn.Sequential:
    """[B, ...] of `inputs` values an example to [B, classes]; layers `fc1` and `fc2`, torch's own start."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(inputs, hidden),
            relu=nn.ReLU(),
            fc2=nn.Linear(hidden, classes),
        )
    )
