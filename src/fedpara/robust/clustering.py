"""Defences that look for groups of similar directions: backdoors hide in length, less so in direction."""

import torch
from torch import Tensor

from fedpara.robust.geometry import Geometry, median
from fedpara.robust.weighing import clip_factors, only

TOO_LONG = 2.0
"""`auto` drops updates longer than this many median norms."""


def flame(g: Geometry) -> Tensor:
    return g.w


def auto(g: Geometry) -> Tensor:
    return g.w
