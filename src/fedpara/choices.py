"""Choices and defaults that the command line's help shows.

This module imports nothing heavy, so `fedpara --help` and a mistyped option respond without loading torch.
"""

from pathlib import Path

DATASETS = (
    *("digits", "cifar10", "cifar100", "cinic10", "mnist", "fashion-mnist", "femnist"),
    *("shakespeare", "shakespeare-100", "shakespeare-100-mixed"),
)
MODELS = (
    *("vgg16", "vgg16-nodrop", "vgg16-nobias", "vgg16-gn2", "vgg16-gn2-nodrop", "vgg16-narrow", "vgg16-half"),
    "vgg16-tiny",
    *("resnet18", "resnet18-gn", "resnet18-tiny", "lstm", "lstm-tiny", "mlp", "deep-mlp", "cnn"),
)
SCHEMES = ("original", "lowrank", "fedpara", "pfedpara", "kronecker", "lowrank-aad", "kronecker-aad")
LOSSES = ("cross-entropy", "mse", "mae", "bce", "next-token")
METRICS = (
    *("accuracy", "top-5", "f1", "auroc", "r2", "mse", "mae"),
    *("dice", "iou", "perplexity", "token-accuracy"),
)
DEFENCES = (
    *("auto", "mean", "median", "trimmed-mean", "krum", "multi-krum"),
    *("rfa", "centred-clip", "norm-clip", "fltrust", "flame"),
)
ATTACKS = ("sign-flip", "scaling", "noise", "label-flip", "backdoor", "alie", "ipm", "gauge")
"""Copies of the names in `data`, `models`, `parameterization`, `tasks`, `robust` and `attacks`, which import torch. A
test compares them."""
SPLITS = ("iid", "dirichlet", "dirichlet-capped", "shards", "owner", "largest", "drawn")
ENGINES = ("auto", "sequential", "batched", "flower")
PRODUCTS = ("mean", "refit")
SAMPLERS = ("uniform", "poisson", "by-data")
FORMATS = ("html", "markdown", "csv", "latex", "png", "svg", "pdf")
"""Output formats of `fedpara report`."""

DEFAULTS = {
    "dataset": "digits",
    "model": "cnn",
    "scheme": "fedpara",
    "loss": "cross-entropy",
    "algorithm": "fedavg",
    "share": "all",
    "split": "dirichlet",
    "alpha": 0.5,
    "clients": 100,
    "cohort": 10,
    "sampler": "uniform",
    "lost": 0.0,
    "rounds": 20,
    "epochs": 1,
    "batch_size": 32,
    "lr": 0.1,
    "lr_decay": 1.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "optimizer": "sgd",
    "jacobian": 0.0,
    "augment": "none",
    "validation": 0.0,
    "link_up": "float32",
    "link_down": "float32",
    "evaluate_every": 1,
    "weights": "examples",
    "products": "mean",
    "hostile": 0.0,
    "recycle": 0,
    "seed": 0,
    "engine": "auto",
}
"""Defaults of an Experiment's fields that are options of `fedpara run`. A test compares them."""

REFERENCE = "package.module:function"
"""How a user names a function of their own; see `references`."""

CLASSES = 10
"""Default number of classes of a library model, in `fedpara export` and `inspect`."""

PAPER_RUNS = Path("runs/paper")
PAPER_RESULTS = Path("results/paper")
ROBUSTNESS = Path("results/robustness")
TUNED, TUNED_RUNS = "tuned-", Path("runs/tuned")
"""Prefix of the prepared studies' names, and the folder of their runs."""
FRONTIER_RUNS = Path("runs/frontier")
RESULTS = Path("results")

DEADLINE = 3600.0
"""Seconds that a Flower server waits for a round."""
MIN_REPLIES = 1
OVERSAMPLE = 0
