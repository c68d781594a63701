"""Golden: each algorithm against a NumPy version of its paper's pseudocode, on quadratics.

Client i has f_i(w) = 1/2 w^T A_i w - b_i^T w, so its gradient is A_i w - b_i: no sampling, no network.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpara import algorithms
from fedpara.algorithms import Algorithm, Local, Update, Variables, Visit, clip_by_norm, sgd
from fedpara.algorithms.optimizers import build_optimizer
from fedpara.errors import ConfigError
from fedpara.state import State, clone

Vector = NDArray[np.float64]

N, ROUNDS, COHORT, ETA, K, BATCH = 6, 5, 3, 0.05, 4, 5
EXAMPLES = [3, 50, 7, 20, 1, 12]
SHAPES = {"layer.weight": (2, 3), "layer.bias": (2,)}
SIZE = 8

_rng = np.random.default_rng(0)
_roots = _rng.normal(size=(N, SIZE, SIZE)) / np.sqrt(SIZE)
A = _roots @ _roots.transpose(0, 2, 1) + 0.3 * np.eye(SIZE)
B = _rng.normal(size=(N, SIZE))
X0 = _rng.normal(size=SIZE)
COHORTS = [sorted(_rng.choice(N, COHORT, replace=False).tolist()) for _ in range(ROUNDS)]


def gradient(i: int, w: Vector) -> Vector:
    return np.asarray(A[i] @ w - B[i])


def to_state(w: Vector) -> State:
    parts = np.split(w, [6])
    return {n: torch.from_numpy(p.copy()).view(s) for (n, s), p in zip(SHAPES.items(), parts, strict=True)}


def to_vector(state: State) -> Vector:
    assert list(state) == list(SHAPES)
    assert all(tensor.dtype == torch.float64 for tensor in state.values())
    return np.concatenate([tensor.flatten().numpy() for tensor in state.values()])


@dataclass
class Federation:
    x: State
    server: Variables
    clients: dict[int, Variables]


def federate(algorithm: Algorithm) -> Federation:
    """The loop of `algorithms/core.py`, written out, one client after another."""
    x = to_state(X0)
    run = Federation(x, algorithm.server_init(x), {})
    local = algorithm.local
    for round in range(1, ROUNDS + 1):
        eta, down, updates = local.lr_at(round), algorithm.broadcast(run.server), []
        for i in COHORTS[round - 1]:
            client = run.clients.get(i) or algorithm.client_init(run.x)
            y, steps = clone(run.x), local.steps_for(EXAMPLES[i])
            optimizer = build_optimizer(local)
            slots = optimizer.init(y)
            for _ in range(steps):
                g = to_state(gradient(i, to_vector(y)))
                if local.clip is not None:
                    g = clip_by_norm(g, local.clip)
                g = algorithm.correct(g, y, run.x, down, client)
                y, slots = optimizer.step(y, g, slots, eta)
            up, run.clients[i] = algorithm.finish(run.x, y, down, client, steps, eta)
            updates.append(Update(algorithm.send(run.x, y, Visit(i, round, steps, eta, 0)), up, EXAMPLES[i]))
        run.x, run.server = algorithm.aggregate(run.x, run.server, updates, N)
    return run


def descend(i: int, x: Vector, shift: Vector | float = 0.0, pull: float = 0.0) -> Vector:
    y = x.copy()
    for _ in range(K):
        y = y - ETA * (gradient(i, y) + shift + pull * (y - x))
    return y


Result = tuple[Vector, dict[str, Vector], dict[int, dict[str, Vector]]]


def np_fedavg(mu: float = 0.0) -> Result:
    x = X0
    for cohort in COHORTS:
        ys = [descend(i, x, pull=mu) for i in cohort]
        x = np.average(ys, axis=0, weights=[EXAMPLES[i] for i in cohort])
    return x, {}, {}


def np_fednova(rho: float) -> Result:
    """Clients make different numbers of steps. The path is summed step by step, with every gradient 1."""
    x = X0
    for cohort in COHORTS:
        p = np.array([EXAMPLES[i] for i in cohort]) / sum(EXAMPLES[i] for i in cohort)
        lengths, directions = [], []
        for i in cohort:
            y, v, unit, length = x.copy(), np.zeros(SIZE), 0.0, 0.0
            for _ in range(-(-EXAMPLES[i] // BATCH)):
                v, unit = rho * v + gradient(i, y), rho * unit + 1
                y, length = y - ETA * v, length + unit
            lengths.append(length)
            directions.append((x - y) / length)
        x = x - p @ np.array(lengths) * (p @ np.array(directions))
    return x, {}, {}


def np_scaffold(eta_g: float) -> Result:
    x, c, own = X0, np.zeros(SIZE), {i: np.zeros(SIZE) for i in range(N)}
    for cohort in COHORTS:
        dx, dc = np.zeros(SIZE), np.zeros(SIZE)
        for i in cohort:
            y = descend(i, x, c - own[i])
            new = own[i] - c + (x - y) / (K * ETA)
            dx, dc, own[i] = dx + (y - x) / COHORT, dc + (new - own[i]) / COHORT, new
        x, c = x + eta_g * dx, c + COHORT / N * dc
    return x, {"control": c}, {i: {"control": own[i]} for i in own}


def np_feddyn(alpha: float) -> Result:
    x, h, own = X0, np.zeros(SIZE), {i: np.zeros(SIZE) for i in range(N)}
    for cohort in COHORTS:
        ys = []
        for i in cohort:
            y = descend(i, x, -own[i], alpha)
            own[i] = own[i] - alpha * (y - x)
            ys.append(y)
        h = h - alpha / N * sum(y - x for y in ys)
        x = np.mean(ys, axis=0) - h / alpha
    return x, {"h": h}, {i: {"h": own[i]} for i in own}


def np_adaptive(rule: Callable[[Vector, Vector], Vector], eta_g: float, b1: float, tau: float) -> Result:
    x, m, v = X0, np.zeros(SIZE), np.full(SIZE, tau**2)
    for cohort in COHORTS:
        changes = [descend(i, x) - x for i in cohort]
        d = np.average(changes, axis=0, weights=[EXAMPLES[i] for i in cohort])
        m = b1 * m + (1 - b1) * d
        v = rule(v, d)
        x = x + eta_g * m / (np.sqrt(v) + tau)
    return x, {"m": m, "v": v}, {}


def adam(v: Vector, d: Vector) -> Vector:
    return 0.95 * v + 0.05 * d**2


def yogi(v: Vector, d: Vector) -> Vector:
    return v - 0.05 * d**2 * np.sign(v - d**2)


def adagrad(v: Vector, d: Vector) -> Vector:
    return v + d**2


SERVER: dict[str, Any] = {"server_lr": 0.2, "beta1": 0.8, "tau": 0.02}
CASES: dict[str, tuple[Algorithm, Result]] = {
    "fedavg": (algorithms.fedavg(lr=ETA, steps=K), np_fedavg()),
    "fedprox": (algorithms.fedprox(0.7, lr=ETA, steps=K), np_fedavg(mu=0.7)),
    "fednova": (algorithms.fednova(lr=ETA, batch_size=BATCH), np_fednova(0.0)),
    "fednova, momentum 0.5": (
        algorithms.fednova(lr=ETA, batch_size=BATCH, momentum=0.5),
        np_fednova(0.5),
    ),
    "fednova, equal steps": (algorithms.fednova(lr=ETA, steps=K), np_fedavg()),
    "scaffold": (algorithms.scaffold(lr=ETA, steps=K), np_scaffold(1.0)),
    "scaffold, eta_g 0.6": (algorithms.scaffold(0.6, lr=ETA, steps=K), np_scaffold(0.6)),
    "feddyn": (algorithms.feddyn(0.4, lr=ETA, steps=K), np_feddyn(0.4)),
    "fedadam": (
        algorithms.fedadam(**SERVER, beta2=0.95, lr=ETA, steps=K),
        np_adaptive(adam, 0.2, 0.8, 0.02),
    ),
    "fedyogi": (
        algorithms.fedyogi(**SERVER, beta2=0.95, lr=ETA, steps=K),
        np_adaptive(yogi, 0.2, 0.8, 0.02),
    ),
    "fedadagrad": (algorithms.fedadagrad(**SERVER, lr=ETA, steps=K), np_adaptive(adagrad, 0.2, 0.8, 0.02)),
}


@pytest.mark.parametrize("case", CASES)
def test_five_rounds_equal_numpy(case: str) -> None:
    algorithm, (x, server, clients) = CASES[case]
    run = federate(algorithm)
    np.testing.assert_allclose(to_vector(run.x), x, rtol=0, atol=1e-10)
    assert run.server.keys() == server.keys()
    for name, variable in server.items():
        np.testing.assert_allclose(to_vector(run.server[name]), variable, rtol=0, atol=1e-10)
    seen = {i for cohort in COHORTS for i in cohort}
    assert run.clients.keys() == seen
    for i in seen:
        assert run.clients[i].keys() == clients.get(i, {}).keys()
        for name, state in run.clients[i].items():
            np.testing.assert_allclose(to_vector(state), clients[i][name], rtol=0, atol=1e-10)


def test_cohorts_are_partial_and_repeat_clients() -> None:
    """Otherwise the golden cases would not cover the variables of a returning client."""
    assert any(set(a) & set(b) for a, b in pairwise(COHORTS))
    assert len({tuple(cohort) for cohort in COHORTS}) > 1


def test_fedprox_0_is_fedavg() -> None:
    prox, avg = federate(algorithms.fedprox(0.0, lr=ETA)), federate(algorithms.fedavg(lr=ETA))
    assert all(torch.equal(prox.x[name], avg.x[name]) for name in SHAPES)


def test_scaffold_with_zero_control_steps_as_fedavg() -> None:
    """Only the local steps of the first round: the averages have different weights."""
    algorithm, i = algorithms.scaffold(lr=ETA, steps=K), COHORTS[0][0]
    x = to_state(X0)
    control = algorithm.client_init(x)
    y = x
    for _ in range(K):
        g = algorithm.correct(to_state(gradient(i, to_vector(y))), y, x, algorithm.server_init(x), control)
        y, _ = build_optimizer(algorithm.local).step(y, g, {}, ETA)
    np.testing.assert_allclose(to_vector(y), descend(i, X0), rtol=0, atol=1e-14)


def test_scaffold_at_equal_examples_starts_as_fedavg() -> None:
    x = to_state(X0)
    updates = [Update(to_state(X0 + i), {"control": to_state(0 * X0)}, examples=5) for i in range(3)]
    scaffold, _ = algorithms.scaffold().aggregate(x, algorithms.scaffold().server_init(x), updates, N)
    fedavg, _ = algorithms.fedavg().aggregate(x, {}, updates, N)
    np.testing.assert_allclose(to_vector(scaffold), to_vector(fedavg), rtol=0, atol=1e-14)


def test_scaffold_control_is_the_mean_of_the_clients_controls() -> None:
    """Uniform means keep the invariant c = 1/N sum_i c_i, where clients that never trained count as 0."""
    run = federate(algorithms.scaffold(lr=ETA))
    total = sum(to_vector(client["control"]) for client in run.clients.values())
    np.testing.assert_allclose(to_vector(run.server["control"]), total / N, rtol=0, atol=1e-12)


def test_feddyn_h_is_the_mean_of_the_clients_h() -> None:
    run = federate(algorithms.feddyn(0.4, lr=ETA))
    total = sum(to_vector(client["h"]) for client in run.clients.values())
    np.testing.assert_allclose(to_vector(run.server["h"]), total / N, rtol=0, atol=1e-12)


def test_fedadam_first_step_in_closed_form() -> None:
    """x + eta_g (1 - b1) d / (sqrt(b2 tau^2 + (1 - b2) d^2) + tau) for d = mean(y_i - x)"""
    algorithm = algorithms.fedadam(server_lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3)
    x = to_state(X0)
    d = np.linspace(-2.0, 2.0, SIZE)
    updates = [Update(to_state(X0 + 2 * d), {}, 1), Update(to_state(X0 + d / 2), {}, 2)]
    new, _ = algorithm.aggregate(x, algorithm.server_init(x), updates, N)
    step = 0.01 * 0.1 * d / (np.sqrt(0.99e-6 + 0.01 * d**2) + 1e-3)
    np.testing.assert_allclose(to_vector(new), X0 + step, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", algorithms.names())
def test_local_options_change_every_algorithm(name: str) -> None:
    """A clip above every gradient changes nothing; a lower clip, momentum and decay do."""
    free = Local(lr=ETA, epochs=2, batch_size=8)
    build = algorithms.build
    loose = federate(build(name, replace(free, clip=1e6)))
    plain = federate(build(name, free))
    assert all(torch.equal(loose.x[n], plain.x[n]) for n in SHAPES)
    for change in ({"clip": 0.5}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"lr_decay": 0.5}):
        if name == "scaffold" and "momentum" in change:
            with pytest.raises(ConfigError, match=r"momentum 0\.5: expected 0"):
                build(name, replace(free, **change))  # type: ignore[arg-type]
            continue
        other = federate(build(name, replace(free, **change)))  # type: ignore[arg-type]
        assert not all(torch.equal(other.x[n], plain.x[n]) for n in SHAPES), change


def test_scaffold_and_feddyn_reach_the_optimum_that_fedavg_misses() -> None:
    """With different clients, several local steps and full cohorts, FedAvg's fixed point is not the minimum."""
    best = np.linalg.solve(A.mean(0), B.mean(0))

    def distance(algorithm: Algorithm) -> float:
        x = to_state(X0)
        server = algorithm.server_init(x)
        clients = [algorithm.client_init(x) for _ in range(N)]
        for _ in range(60):
            down, updates = algorithm.broadcast(server), []
            for i in range(N):
                y = x
                for _ in range(10):
                    g = to_state(gradient(i, to_vector(y)))
                    y, _ = sgd().step(y, algorithm.correct(g, y, x, down, clients[i]), {}, 0.1)
                up, clients[i] = algorithm.finish(x, y, down, clients[i], 10, 0.1)
                updates.append(Update(y, up, 1))
            x, server = algorithm.aggregate(x, server, updates, N)
        return float(np.linalg.norm(to_vector(x) - best))

    assert distance(algorithms.scaffold()) < 1e-6
    assert distance(algorithms.feddyn(2.0)) < 1e-6
    assert distance(algorithms.fedavg()) > 0.1
