"""Crop and flip: pad by 4, crop to the original size at random, mirror half of the images.

The host draws from the client's stream, and the images' device applies the draws, so every engine crops alike.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

PAD = 4


def draw(count: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """[3, count]: for each image the top and left of its window, and whether it is mirrored."""
    offsets = generator.integers(0, 2 * PAD + 1, size=(2, count))
    flips = generator.integers(0, 2, size=(1, count))
    return np.concatenate([offsets, flips]).astype(np.uint8)


def crop_flip(images: Tensor, draws: Tensor) -> Tensor:
    """images [B, C, H, W], normalised; draws [3, B] from `draw`."""
    count, channels, height, width = images.shape
    tops, lefts, flips = draws.long().unsqueeze(-1)
    across = torch.arange(width, device=images.device)
    rows = tops + torch.arange(height, device=images.device)
    columns = lefts + torch.where(flips > 0, width - 1 - across, across)
    padded = pad(images, (PAD, PAD, PAD, PAD))
    i = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    c = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    return padded[i, c, rows.view(count, 1, height, 1), columns.view(count, 1, 1, width)]
