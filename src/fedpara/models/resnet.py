"""ResNet18 (appendix D.2) for 32x32 images, with the usual 3x3 stem of stride 1 and no max-pool.

The paper uses BatchNorm. GroupNorm is an option for clients with different data distributions.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from fedpara.models.init import he_convolutions

WIDTHS = (64, 128, 256, 512)
Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """relu(norm2(conv2(relu(norm1(conv1(x))))) + shortcut(x)); the shortcut is a 1x1 conv where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(classes: int = 10, norm: str = "batch", channels: int = 3, shrink: int = 1) -> nn.Sequential:
    """[B, channels, H, W] to [B, classes]; `norm` is "batch" or "group" (32 groups). `shrink` divides the widths."""
    widths = [full // shrink for full in WIDTHS]
    norms: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": lambda width: nn.GroupNorm(32, width)}
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
        norm1=norms[norm](widths[0]),
        relu=nn.ReLU(),
    )
    inputs = widths[0]
    for stage, width in enumerate(widths, start=1):
        stride = 1 if stage == 1 else 2
        layers[f"layer{stage}"] = nn.Sequential(
            BasicBlock(inputs, width, stride, norms[norm]), BasicBlock(width, width, 1, norms[norm])
        )
        inputs = width
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(inputs, classes)}
    model = nn.Sequential(layers)
    he_convolutions(model)
    return model
