"""A user's package with a model, data, a split, a rule and an algorithm, written into a test's folder."""

import sys

PACKAGE = {
    "__init__.py": "from NAME.networks import net\n",
    "networks.py": """
import math
from torch import nn

def net(classes, shape, width=16):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, classes)
    )

def frozen(classes):
    model = net(classes, (1, 8, 8))
    model[3].weight.requires_grad_(False)
    return model

def number(classes):
    return classes

def first(name, module, parameter):
    return name == "1" and parameter == "weight"

def at_least(size):
    return lambda name, module, parameter: getattr(module, parameter).numel() >= size
""",
    "reading.py": """
from fedpara import data
from fedpara.data import FederatedData
from helping_NAME import COUNT

def digits(count=COUNT):
    train, test = data.load("digits")
    return train.subset(range(count)), test.subset(range(100))

def federation(clients=4):
    train, _ = digits()
    return FederatedData(train, [list(range(i, len(train), 4)) for i in range(4)])

def number():
    return 3

def strips(targets, clients, seed, offset=0):
    order = (targets.argsort(stable=True) + offset) % len(targets)
    return [part.tolist() for part in order.chunk(clients)]

def halves(targets, clients, seed):
    return targets.argsort().chunk(2)
""",
    "methods.py": """
from dataclasses import replace
from fedpara import algorithms
from fedpara.algorithms import FromMean
from fedpara.state import add, subtract

def slow(mu=0.5, **local):
    def step(x, server, mean, clients):
        return add(x, subtract(mean.y, x), mu), {}
    return replace(algorithms.fedavg(**local), name="slow", aggregate=FromMean(step))

def with_local(mu=0.5, *, local=None):
    return slow(mu, local=local)

def without(mu=0.5):
    return slow(mu)

def number(**local):
    return 3
""",
    "test_nothing.py": "",
}


def write_package(folder, name):
    """Write the package and a module beside it into the folder. Its functions are NAME.networks:net and so on."""
    (folder / name).mkdir(parents=True)
    for file, code in PACKAGE.items():
        (folder / name / file).write_text(code.replace("NAME", name))
    (folder / f"helping_{name}.py").write_text("COUNT = 200\n")


def fields(name):
    """Fields of an experiment that uses all of it."""
    return {
        "dataset": f"{name}.reading:digits",
        "model": f"{name}:net(width=12)",
        "where": f"{name}.networks:first",
        "split": f"{name}.reading:strips(offset=3)",
        "algorithm": f"{name}.methods:slow",
        "options": {"mu": 0.8},
    }


def forget(name):
    """Import the package anew, as another process would."""
    for module in [m for m in sys.modules if m.partition(".")[0] in (name, f"helping_{name}")]:
        del sys.modules[module]
