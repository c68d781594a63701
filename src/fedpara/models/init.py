"""Initial weights of the convolutional models: W ~ N(0, 2 / (O k1 k2)), bias 0 (He, fan out, ReLU).

Linear layers and norms keep torch's initialisation. torchvision draws the linear layers of VGG with std 0.01. On
the 512-512-C head here, that makes the gradient at the features 18 times smaller than torch's initialisation.
"""

from torch import nn


def he_convolutions(model: nn.Module) -> None:
    """Redraw every 2-d convolution of the model, in order, from torch's global generator."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
