"""Crop-and-flip: pad by 4, cut a window of the old size, mirror every other image."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

PAD = 4


def crop_flip(images: Tensor, generator: np.random.Generator) -> Tensor:
    """images [B, C, H, W], normalised; draws two offsets and a coin for each."""
    count, channels, height, width = images.shape
    tops, lefts = torch.from_numpy(generator.integers(0, 2 * PAD + 1, size=(2, count)))
    flips = torch.from_numpy(generator.integers(0, 2, size=count)).bool()
    rows = tops[:, None] + torch.arange(height)
    across = torch.arange(width)
    columns = lefts[:, None] + torch.where(flips[:, None], across.flip(0), across)
    padded = pad(images, (PAD, PAD, PAD, PAD))
    index = torch.arange(count)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    return padded[(*index, rows[:, None, :, None], columns[:, None, None, :])]
