"""Robust aggregation: defences against hostile clients, as values that replace the mean of any algorithm.

Distances, norms and medians are those of composed weights, so rescaled factors cannot mislead them.
"""

from collections.abc import Callable

from fedpara.parameterization.composed import Blocks
from fedpara.robust.core import Defence, robust_mean
from fedpara.robust.defences import (
    auto,
    centred_clip,
    flame,
    fltrust,
    krum,
    mean,
    median,
    multi_krum,
    norm_clip,
    rfa,
    trimmed_mean,
)

DEFENCES: dict[str, Callable[..., Defence]] = {
    "auto": auto,
    "mean": mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
    "multi-krum": multi_krum,
    "rfa": rfa,
    "centred-clip": centred_clip,
    "norm-clip": norm_clip,
    "fltrust": fltrust,
    "flame": flame,
}
"""By the name that a config gives them, with arguments: "trimmed-mean(0.2)"."""

__all__ = [
    "DEFENCES",
    "Blocks",
    "Defence",
    "auto",
    "centred_clip",
    "flame",
    "fltrust",
    "krum",
    "mean",
    "median",
    "multi_krum",
    "norm_clip",
    "rfa",
    "robust_mean",
    "trimmed_mean",
]
