"""Find shapes in noisy images: a U-Net with a custom loss, one client per camera.

Data: generated discs and boxes. Takes about ten seconds on a CPU.
"""

# --8<-- [start:data]
import torch
import torch.nn.functional as F
from torch import nn

import fedpara as fp
from fedpara import algorithms

SIZE = 32


def draw(count, noise, seed):
    """`count` noisy images, [N, 1, 32, 32], each of one disc or box, and its mask."""
    generator = torch.Generator().manual_seed(seed)
    x, y, radius = torch.rand(3, count, 1, 1, generator=generator)
    radius = 3 + 6 * radius
    grid = torch.arange(SIZE)
    dx, dy = (grid - 6 - 20 * x).abs(), (grid[:, None] - 6 - 20 * y).abs()
    disc, box = dx**2 + dy**2 < radius**2, torch.maximum(dx, dy) < radius
    masks = torch.where(torch.rand(count, 1, 1, generator=generator) < 0.5, disc, box)[:, None]
    return masks + noise * torch.randn(count, 1, SIZE, SIZE, generator=generator), masks


def load(clients=6, images=24):
    cameras = [draw(images, noise=0.3 + 0.1 * client, seed=client) for client in range(clients)]
    return fp.FederatedData.of(cameras, test=draw(50, noise=0.5, seed=1000))


# --8<-- [end:data]


# --8<-- [start:model]
def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        fine = self.down1(x)
        middle = self.down2(F.max_pool2d(fine, 2))
        coarse = self.bottom(F.max_pool2d(middle, 2))
        middle = self.up2(torch.cat([middle, F.interpolate(coarse, scale_factor=2)], 1))
        return self.head(self.up1(torch.cat([fine, F.interpolate(middle, scale_factor=2)], 1)))


# --8<-- [end:model]


# --8<-- [start:loss]
def dice_bce(output, target):
    """1 - dice of the probabilities, plus the binary cross-entropy: one value per image."""
    target = target.to(output)
    p, bce = output.sigmoid(), F.binary_cross_entropy_with_logits(output, target, reduction="none")
    overlap, total = (p * target).sum((1, 2, 3)), (p + target).sum((1, 2, 3))
    return 1 - (2 * overlap + 1) / (total + 1) + bce.mean((1, 2, 3))


# --8<-- [end:loss]

# --8<-- [start:run]
if __name__ == "__main__":
    data = load()
    algorithm = algorithms.fedavg(lr=3e-3, optimizer="adam", batch_size=8)
    runs = {}
    for name, scheme in {"original": None, "FedPara": fp.FedPara(gamma=0.1)}.items():
        torch.manual_seed(0)
        model = UNet() if scheme is None else fp.factorize(UNet(), scheme)
        task = fp.Task(model, loss=dice_bce, metrics=["dice", "iou"])
        runs[name] = run = fp.simulate(task, data, algorithm, rounds=10, cohort=3)
        scores = run.rounds[-1].scores
        print(f"{name:8}  dice {scores['dice']:.1%}, IoU {scores['iou']:.1%}, {run.bytes / 1e6:.2f} MB sent")
# --8<-- [end:run]
