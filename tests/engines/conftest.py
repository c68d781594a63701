"""A federation small enough to check by hand: 6 clients of unequal size, 8 x 8 digits, two layers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.algorithms import Algorithm
from fedpara.data import Examples
from fedpara.engines import Run, Task
from fedpara.engines.client import Reply
from fedpara.engines.program import make_program
from fedpara.engines.server.engine import Engine
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.engines.simulate import build_engine
from fedpara.parameterization import AwareKronecker, AwareLowRank, Kronecker, Scheme
from fedpara.state import State
from fedpara.tasks import Score
from fedpara.wire import Message

ENGINES = ("sequential", "batched")
"""Add an engine here, and every contract test checks that it gives the same numbers."""

SIZES = (12, 7, 16, 9, 5, 11)

SCHEMES: dict[str, Callable[[], Scheme | None]] = {
    "original": lambda: None,
    "lowrank": lambda: fp.LowRank(gamma=0.1),
    "fedpara": lambda: fp.FedPara(gamma=0.1),
    "pfedpara": lambda: fp.PFedPara(gamma=0.1),
    "kronecker": lambda: Kronecker(ratio=0.2),
    "lowrank-aad": lambda: AwareLowRank(ratio=0.2),
    "kronecker-aad": lambda: AwareKronecker(ratio=0.2),
}


@pytest.fixture(scope="session")
def digits() -> tuple[Examples, Examples]:
    train, test = data.load("digits")
    return train.subset(np.arange(160)), test.subset(np.arange(60))


class Recorded:
    """An engine that records every message, and the clients whose updates the server accepted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.down: list[bytes] = []
        self.up: list[list[Reply]] = []
        self.accepted: list[list[int]] = []

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def why(self) -> str:
        return self.engine.why

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        self.down.append(bytes(message))
        self.up.append([])
        for reply in self.engine.train(round, clients, message, personal):
            self.up[-1].append(replace(reply, message=reply.message and bytes(reply.message)))
            yield reply

    def commit(self, round: int, clients: Sequence[int]) -> None:
        self.accepted.append(list(clients))
        self.engine.commit(round, clients)

    def evaluate(self, state: State) -> Score | None:
        return self.engine.evaluate(state)

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterable[Reply]:
        return self.engine.score_clients(round, clients, message)


@dataclass(frozen=True)
class World:
    train: Examples
    test: Examples
    clients: list[range]

    def model(self, scheme: str = "original", network: Callable[[], nn.Module] | None = None) -> nn.Module:
        torch.manual_seed(0)
        plain = network() if network else models.mlp(64, hidden=32, classes=10)
        chosen = SCHEMES[scheme]()
        return plain if chosen is None else fp.factorize(plain, chosen)

    @property
    def federation(self) -> fp.FederatedData:
        return fp.FederatedData(self.train, self.clients)

    @property
    def personal(self) -> fp.FederatedData:
        """Each client holds out its last two examples as test data."""
        rows = [list(row) for row in self.clients]
        return fp.FederatedData(
            self.train, [row[:-2] for row in rows], test_clients=[row[-2:] for row in rows]
        )

    def algorithm(self, name: str = "fedavg", **fields: Any) -> Algorithm:
        local = algorithms.Local(**{"lr": 0.05, "batch_size": 4, **fields})
        return algorithms.build(name, local)

    def simulate(
        self,
        model: nn.Module,
        algorithm: Algorithm | None = None,
        *,
        federation: fp.FederatedData | None = None,
        **options: Any,
    ) -> Run:
        options = {"rounds": 2, "cohort": 3, "engine": "sequential", **options}
        task = Task(model, test=self.test)
        return fp.simulate(task, federation or self.federation, algorithm or self.algorithm(), **options)

    def session(
        self,
        model: nn.Module,
        algorithm: Algorithm | None = None,
        link: fp.Link | None = None,
        share: Any = "all",
        seed: int = 0,
    ) -> Session:
        return Session(make_program(model, share), algorithm or self.algorithm(), link or fp.Link(), seed)

    def engine(self, name: str, session: Session, memory: Any, federation: Any = None) -> Recorded:
        task = Task(session.program.model, test=self.test)
        return Recorded(
            build_engine(
                Settings(rounds=1, cohort=3, engine=name),
                session,
                task,
                federation or self.federation,
                memory,
            )
        )


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def world() -> World:
    train, test = data.load("digits")
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    clients = [range(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return World(train.subset(range(sum(SIZES))), test.subset(range(50)), clients)
