"""Rounds of the sequential engine whose steps are recorded and replayed, and models that must not be replayed."""

import random

import numpy as np
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.algorithms import Optimizer
from fedpara.data import Examples
from fedpara.engines.local.engine import Sequential
from fedpara.engines.local.worker import Worker
from fedpara.engines.memory import InMemory
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.setup.private_run import open_session

SIZES = (12, 7, 16, 9)  # with batches of 4: short ones of 1 and 3 examples


def images(count=44, shape=(3, 8, 8), dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, *shape, generator=generator, dtype=dtype)
    return Examples(inputs, torch.randint(0, 5, (count,), generator=generator), 5)


def network(width=4, channels=3):
    """A small network; BatchNorm would need batches of two examples or more."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.GroupNorm(2, width),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(64 * width, 5),
    )


def lagging(lr_of=lambda lr: lr):
    """A custom optimizer without a step in place: it moves along the gradient before last, returned as another slot."""

    def step(y, g, slots, lr):
        moved = {name: tensor - lr_of(lr) * slots["last"][name] for name, tensor in y.items()}
        return moved, {"new": g, "last": slots["new"]}

    def init(y):
        return {slot: {name: torch.zeros_like(t) for name, t in y.items()} for slot in ("new", "last")}

    return Optimizer("lagging", init, step)


METHODS = {
    "sgd": lambda: algorithms.fedavg(lr=0.05, batch_size=4, epochs=2, lr_decay=0.9),
    "momentum": lambda: algorithms.fedavg(lr=0.05, batch_size=4, momentum=0.9, weight_decay=0.01),
    "clip, schedule": lambda: algorithms.fedavg(
        lr=0.05, batch_size=4, clip=0.5, schedule=fp.cosine(warmup=1, within=True)
    ),
    "adam": lambda: algorithms.fedavg(lr=0.01, batch_size=4, optimizer="adam", weight_decay=0.1),
    "adamw": lambda: algorithms.fedavg(lr=0.01, batch_size=4, optimizer="adamw"),
    "kept adam": lambda: algorithms.fedavg(lr=0.01, batch_size=4, optimizer="adam", keep_optimizer=True),
    "custom optimizer": lambda: algorithms.fedavg(lr=0.05, batch_size=4, optimizer=lagging()),
    "fedprox": lambda: algorithms.fedprox(lr=0.05, batch_size=4, mu=0.1),
    "scaffold": lambda: algorithms.scaffold(lr=0.05, batch_size=4),
    "feddyn": lambda: algorithms.feddyn(lr=0.05, batch_size=4),
    "ditto": lambda: algorithms.ditto(lr=0.05, batch_size=4, personal_steps=3),
    "per client": lambda: algorithms.fedavg(
        batch_size=4, per_client=lambda client: {"lr": 0.02 * (client + 1), "epochs": 1 + client % 2}
    ),
}


def played(
    model,
    method,
    recorder,
    *,
    examples=None,
    augment="none",
    rounds=2,
    device="cpu",
    precision=None,
    **options,
):
    """(each round's progress, the memory, the engine). Without a recorder, steps run one by one."""
    examples = images() if examples is None else examples
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    clients = [range(a, a + n) for a, n in zip(starts, SIZES, strict=True)]
    federation, memory = fp.FederatedData(examples, clients), InMemory()
    task = fp.Task(model, test=examples.part(slice(9)), augment=augment)
    session = open_session(make_program(model), method, fp.Link(), seed=0, **options)
    engine = Sequential(
        session, task, federation, memory, device=torch.device(device), precision=precision, capture=False
    )
    old = engine.worker
    engine.worker = Worker(session.program, task, old.device, old.precision, old.stay, recorder)
    schedule = Schedule(rounds, len(SIZES), len(SIZES), federation.size)
    return list(run_rounds(session, engine, schedule, personal=False)), memory, engine


def assert_same(one, other):
    """The same bits: models, losses, scores and what the clients keep."""
    for a, b in zip(one[0], other[0], strict=True):
        assert not a.refused, a.refused
        assert (a.train_loss, a.scores) == (b.train_loss, b.scores)
    progress = one[0][-1].progress, other[0][-1].progress
    for name, tensor in (progress[0].x | progress[0].buffers).items():
        assert torch.equal(tensor, (progress[1].x | progress[1].buffers)[name]), name
    for client in range(len(SIZES)):
        kept, again = (one[1].get(client) or {}, other[1].get(client) or {})
        assert kept.keys() == again.keys()
        for variable, state in kept.items():
            for name, tensor in state.items():
                assert torch.equal(tensor, again[variable][name]), (variable, name)


class Around(nn.Module):
    """A network with something around it."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return self.inner(self.before(x))


class Counts(Around):
    calls = 0

    def before(self, x):
        self.calls += 1
        return x * (1.0 if self.calls % 3 else 0.5)


class CountsInADict(Around):
    def __init__(self):
        super().__init__()
        self.seen = {"steps": [0]}

    def before(self, x):
        self.seen["steps"][0] += 1
        return x / self.seen["steps"][0]


class Remembers(Around):
    """Reads a tensor of the step before, in an attribute that is no buffer."""

    last = None

    def before(self, x):
        shift = 0.0 if self.last is None else self.last
        self.last = x.detach().mean()
        return x - shift


class Rebinds(Around):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def before(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + x.detach().mean()
        return x - self.mean


class DrawsPython(Around):
    def before(self, x):
        return x * random.choice([0.5, 1.0])


class DrawsNumpy(Around):
    def before(self, x):
        return x * float(np.random.rand())


class OwnGenerator(Around):
    def __init__(self):
        super().__init__()
        self.stream = np.random.default_rng(0)

    def before(self, x):
        return x * float(self.stream.random())


class Waits(Around):
    """Reads a value on the host."""

    def before(self, x):
        return x if float(x.detach().mean()) > 0 else -x


class SetsUp(Around):
    """Builds something in its first step only: it may be replayed."""

    mask = None

    def before(self, x):
        if self.mask is None or self.mask.device != x.device:
            self.mask = torch.ones(3, 1, 1, device=x.device)
        return x * self.mask


class PerSize(Around):
    """Keeps a mask for the last batch size: replays of other sizes must not read it."""

    mask = None

    def before(self, x):
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.linspace(0.5, 1.0, len(x), device=x.device).view(-1, 1, 1, 1)
        return x * self.mask


UNCAPTURED = {
    Counts: "a step sets calls",
    CountsInADict: r"a step sets seen.steps.0",
    Remembers: "a step sets last",
    Rebinds: "a step sets mean",
    DrawsPython: "a step draws from Python's generator",
    DrawsNumpy: "a step draws from NumPy's generator",
    OwnGenerator: "a step sets stream",
    Waits: "not permitted when stream is capturing",
}
