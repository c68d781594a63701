"""A round with clients whose updates a test chooses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpara import algorithms
from fedpara.algorithms import Update
from fedpara.engines.program import make_program
from fedpara.engines.server.private import PrivateSum
from fedpara.engines.setup.private_run import open_session
from fedpara.privacy import Spending
from fedpara.wire import Link


class Rounds:
    """The server's part of private rounds on a model of one vector."""

    def __init__(self, kind, clients=10, cohort=5, seed=None, size=3, algorithm=None):
        model = nn.Linear(size, 1, bias=False)
        self.session = open_session(
            make_program(model),
            algorithm or algorithms.fedavg(),
            Link(),
            seed=0,
            privacy=kind,
            privacy_seed=seed,
        )
        self.spending = Spending(kind, clients, cohort, 1e-5, seed=seed)
        self.size = size
        self.reset()

    def reset(self, seed=None):
        if seed is not None:
            self.spending = replace(self.spending, seed=seed)
        self.x, self.round = {"weight": torch.zeros(1, self.size)}, 0
        self.server = self.session.algorithm.server_init(self.x)

    def play(self, changes):
        """One round in which these clients' models are x plus a change. Returns what x changed by."""
        self.round += 1
        total = PrivateSum(self.session, self.spending, self.x, self.server, ("weight",))
        for client, change in enumerate(changes):
            y = {"weight": self.x["weight"] + torch.as_tensor(change, dtype=torch.float32).reshape(1, -1)}
            total.add(client, Update(y, {}, 1), {})
        before = self.x["weight"]
        self.x, self.server, _ = total.aggregate(self.server, self.spending.clients, self.round)
        return (self.x["weight"] - before).flatten().double().numpy()


@pytest.fixture
def rounds():
    return Rounds


@pytest.fixture
def spending():
    return lambda kind, **given: replace(Spending(kind, 100, 10, 1e-5), **given)
