"""Choices and defaults that the help texts show.

This module imports nothing heavy, so `fedpara --help` and a mistyped option answer without loading torch.
"""

from pathlib import Path

DATASETS = ("digits", "cifar10", "cifar100", "cinic10", "mnist", "fashion-mnist", "femnist", "shakespeare")
MODELS = (
    *("vgg16", "vgg16-nodrop", "vgg16-nobias", "vgg16-gn2", "vgg16-gn2-nodrop", "vgg16-narrow", "vgg16-tiny"),
    *("resnet18", "resnet18-gn", "resnet18-tiny", "lstm", "lstm-tiny", "mlp", "deep-mlp", "cnn"),
)
"""The keys of `data.names()` and `models.names()`, whose modules import torch. A test compares them."""
SPLITS = ("iid", "dirichlet", "dirichlet-capped", "shards", "owner", "largest")
ENGINES = ("auto", "sequential", "batched", "flower")
FORMATS = ("html", "markdown", "csv", "latex", "png", "svg")
"""Of `fedpara report`."""

CLASSES = 10
"""Classes of a library model in `fedpara export`."""

PAPER_RUNS = Path("runs/paper")
PAPER_RESULTS = Path("results/paper")

DEADLINE = 3600.0
"""Seconds per round that a Flower server waits."""
MIN_REPLIES = 1
OVERSAMPLE = 0
