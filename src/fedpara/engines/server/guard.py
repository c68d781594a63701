"""Guard: a defence against hostile clients on the server, and the server's part of a simulated attack.

It holds a round's updates until the last has arrived, because a defence compares them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedpara.algorithms import Algorithm, FromMean, Update, Variables, Visit
from fedpara.algorithms.core import custom, expect_like
from fedpara.attacks import Attack, hostile_clients
from fedpara.data import Examples, FederatedData
from fedpara.engines.device import eager_device
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import Program
from fedpara.engines.progress import Progress
from fedpara.engines.rng import torch_seed
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError
from fedpara.robust import Blocks, Defence, robust_mean
from fedpara.state import State, mean
from fedpara.tasks import Task

BACKDOOR = "backdoor"
"""The name of the attack's success among the scores."""
CLEAN = 27
"""Separates the draw of clean examples from all others."""

STANDING, CLIENTS = "standing", "clients"
"""The server's variable with every client's standing, if the defence remembers them. Algorithms do not see it."""

Held = Sequence[tuple[int, Update, State]]
"""(client, its update, its buffers) of a round, in the cohort's order"""


@dataclass(frozen=True, eq=False)
class Guard:
    session: Session
    task: Task
    defence: Defence | None
    attack: Attack | None
    hostile: frozenset[int]
    clean: Examples | None
    clients: int
    device: str | None

    def aggregate(
        self,
        algorithm: Algorithm,
        x: State,
        server: Variables,
        now: State,
        held: Held,
        clients: int,
        round: int,
    ) -> tuple[tuple[State, Variables], State]:
        """((the next x, the server's variables), the buffers). `now` are the server's buffers before the round."""
        updates, buffers = self._after_collusion(x, held), [part for *_, part in held]
        aggregate = algorithm.aggregate
        if self.defence is None:
            averages = mean(buffers, [float(update.weight or 0) for update in updates])
            return aggregate(x, server, updates, clients), averages
        assert isinstance(aggregate, FromMean)
        own = self._own_model(x, server, now, round) if self.clean is not None else None
        everyone = server.get(STANDING, {}).get(CLIENTS, torch.zeros(clients, dtype=torch.float64)).cpu()
        ids = [client for client, *_ in held]
        made, averages, standing = robust_mean(
            self.defence, self.blocks, x, updates, buffers, aggregate, own, everyone[ids]
        )
        fresh, variables = aggregate.step(x, without_standing(server), made, clients)
        if standing is not None:
            everyone = everyone.clone()
            everyone[ids] = standing
            variables = {**variables, STANDING: {CLIENTS: everyone}}
        return (fresh, variables), averages

    def probe(self, progress: Progress) -> dict[str, float]:
        """The share of test examples with the trigger that the model takes for the attacker's target."""
        if self.attack is None or self.attack.triggered is None or self.task.test is None:
            return {}
        score = self._worker.evaluate({**progress.x, **progress.buffers}, self._triggered)
        return {BACKDOOR: score.values["accuracy"]}

    @cached_property
    def blocks(self) -> Blocks:
        program = self.session.program
        return Blocks(program.forms, {name: program.initial[name] for name in program.frozen})

    @cached_property
    def _worker(self) -> Worker:
        accuracy = Task(self.task.model, augment=self.task.augment, loss=self.task.loss, metrics=["accuracy"])
        return Worker(self.session.program, accuracy, eager_device(self.device))

    @cached_property
    def _triggered(self) -> Examples:
        assert self.attack is not None
        assert self.attack.triggered is not None
        return self.attack.triggered(self.task.test)  # type: ignore[arg-type]

    def _after_collusion(self, x: State, held: Held) -> list[Update]:
        updates = [update for _, update, _ in held]
        enemies = [client in self.hostile for client, *_ in held]
        honest = [update.y for update, enemy in zip(updates, enemies, strict=True) if not enemy]
        if self.attack is None or self.attack.collude is None or not any(enemies) or not honest:
            return updates
        what = f"attack {self.attack.name!r}: collude"
        with custom(what, "collude(honest updates, x, hostile clients, clients)"):
            sent = self.attack.collude(honest, x, sum(enemies), len(held))
        expect_like(what, sent, honest[0])
        return [replace(u, y=sent) if enemy else u for u, enemy in zip(updates, enemies, strict=True)]

    def _own_model(self, x: State, server: Variables, buffers: State, round: int) -> State:
        """The server's own model after a client's part of a round on the clean examples."""
        session, algorithm, client = self.session, self.session.algorithm, self.clients
        assert self.clean is not None
        program = session.program
        trained = self._worker.train(
            {**program.initial, **buffers, **x},
            self.clean,
            algorithm,
            x,
            algorithm.broadcast(without_standing(server)),
            algorithm.client_init(x),
            seed=session.seed,
            round=round,
            who=client,
        )
        y = {name: trained.parameters[name].to(x[name]) for name in program.shared}
        eta = algorithm.local.of(client).mean_lr(round, trained.steps)
        seed = torch_seed(session.seed, "send", round, client)
        return algorithm.send(x, y, Visit(client, round, trained.steps, eta, seed))


def without_standing(server: Variables) -> Variables:
    """The algorithm's own variables."""
    return {name: state for name, state in server.items() if name != STANDING}


def make_guard(session: Session, task: Task, data: FederatedData, settings: Settings) -> Guard | None:
    """The guard of a run, or None if it has neither a defence nor an attack."""
    defence, attack = settings.robust, settings.attack
    assert not isinstance(defence, str)
    assert not isinstance(attack, str)
    if defence is None and attack is None:
        return None
    if defence is not None:
        _check_defence(defence, session, settings.cohort)
        if settings.rotate:
            raise ConfigError(
                f"robust {defence.name!r} refits every factor, and rotate moves one per round: leave one of them out."
            )
    clean = _clean_examples(defence, data, settings.seed) if defence is not None else None
    hostile = hostile_of(settings, len(data))
    if attack is not None and attack.triggered is not None and task.test is not None:
        attack.triggered(task.test.part(slice(1)))  # raises for a test set that cannot have the trigger
    return Guard(session, task, defence, attack, hostile, clean, len(data), settings.device)


def hostile_of(settings: Settings, clients: int) -> frozenset[int]:
    """The hostile clients of a run."""
    if settings.attack is None:
        return frozenset()
    return hostile_clients(settings.seed, clients, settings.hostile)


def attacked(algorithm: Algorithm, program: Program, settings: Settings, clients: int) -> Algorithm:
    """The algorithm with the settings' attack, if they have one."""
    attack: Any = settings.attack
    return algorithm if attack is None else attack.on(algorithm, hostile_of(settings, clients), program.forms)


def _check_defence(defence: Defence, session: Session, cohort: int) -> None:
    if not isinstance(session.algorithm.aggregate, FromMean):
        raise ConfigError(
            f"robust {defence.name!r} replaces the mean of an algorithm, and {session.algorithm.name!r} has its own "
            "aggregate: use FromMean, or leave robust out."
        )
    if cohort < (least := defence.needs(cohort)):
        raise ConfigError(
            f"robust {defence.name!r} needs at least {least} clients in a round and the cohort has {cohort}: use a "
            "larger cohort, or let the defence assume a smaller share of hostile clients."
        )


def _clean_examples(defence: Defence, data: FederatedData, seed: int) -> Examples | None:
    if not isinstance(defence.clean, int):
        return defence.clean
    if not data.pooled or len(data.train) < defence.clean:
        raise ConfigError(
            f"robust {defence.name!r} draws {defence.clean} clean examples from the training set, and the server holds "
            f"{len(data.train) if data.pooled else 'none'}: give it examples, fltrust(clean=...)."
        )
    generator = np.random.default_rng((seed, CLEAN))
    return data.train.subset(np.sort(generator.choice(len(data.train), defence.clean, replace=False)))
