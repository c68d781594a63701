"""fc2(relu(fc1(x))): the two FC layers of the personalisation experiments (appendix C.2), 256-C.

784-256-62 has 216,894 parameters. `layers` sets the number of hidden layers, all of the same width.
"""

from collections import OrderedDict

from torch import nn


def mlp(inputs: int = 784, hidden: int = 256, classes: int = 10, layers: int = 1) -> nn.Sequential:
    """[B, ...] with `inputs` values per example to [B, classes]; layers `fc1`, `fc2`, ...; torch's initialisation."""
    modules: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    for number in range(1, layers + 1):
        modules += [(f"fc{number}", nn.Linear(inputs, hidden)), (f"relu{number}", nn.ReLU())]
        inputs = hidden
    return nn.Sequential(OrderedDict([*modules, (f"fc{layers + 1}", nn.Linear(inputs, classes))]))
