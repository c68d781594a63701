"""A user's module with a regression task: data, model, loss, metrics, optimizer, schedule and sampler."""

MODULE = """
import torch
from torch import nn

import fedpara as fp
from fedpara.algorithms import Optimizer
from fedpara.state import add

def table(seed=0, clients=4):
    generator = torch.Generator().manual_seed(seed)
    def draw(count):
        x = torch.randn(count, 6, generator=generator)
        return x, x @ torch.arange(6.0) / 6
    return fp.FederatedData.of([draw(20 + i) for i in range(4)], test=draw(40))

def examples():
    federation = table()
    return federation.train, federation.test

def net(width=8):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))

def moved():
    torch.rand(1)
    return net(16)

def huber(output, target):
    return nn.functional.huber_loss(output.squeeze(1), target, reduction="none")

def scaled(by):
    return lambda output, target: by * huber(output, target)

@fp.metric(higher_is_better=False)
def worst(output, target):
    return (output.squeeze(1) - target).abs()

def within(k):
    return lambda output, target: (output.squeeze(1) - target).abs() < k

def signs(weight_decay=0.0):
    def step(y, g, slots, lr):
        return add(y, {name: tensor.sign() for name, tensor in g.items()}, -0.01), slots
    return Optimizer("signs", lambda y: {}, step)

def no_optimizer():
    return 3

def halving(at, rounds):
    return 0.5 ** at

def first(round, clients, cohort, generator):
    return range(cohort)

def twice(round, clients, cohort, generator):
    return [0] * cohort
"""

NAME = "tabular"
FIELDS = {
    "dataset": f"{NAME}:table",
    "model": f"{NAME}:net",
    "scheme": "original",
    "loss": "mse",
    "metrics": "r2, mae",
    "optimizer": "adamw(betas=(0.9, 0.95))",
    "schedule": "cosine(warmup=1)",
    "cohort": 2,
    "rounds": 3,
    "lr": 0.01,
    "batch_size": 8,
}


def write_module(folder):
    (folder / f"{NAME}.py").write_text(MODULE)
