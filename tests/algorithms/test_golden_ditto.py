"""Golden: Ditto through the engine's client, against a NumPy version of its Alg. 1, on quadratics.

Client i has one example, (t_i, s_i), and the model is w with the loss 1/2 sum s_i (w - t_i)^2: its gradient is
s_i (w - t_i). So the whole path is checked: messages, memory, both trainings and the server's mean.
"""

import numpy as np
import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts

N, SIZE, ROUNDS, COHORT = 6, 5, 5, 3
_rng = np.random.default_rng(0)
T, S = _rng.normal(size=(N, SIZE)), _rng.uniform(0.2, 1.5, size=(N, SIZE))
X0 = _rng.normal(size=SIZE)


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.from_numpy(X0.copy()))

    def forward(self, inputs):
        return self.w.expand(len(inputs), SIZE) + 0 * inputs


def half_square(output, target):
    return 0.5 * (target[:, 1] * (output - target[:, 0]).square()).sum(1)


def ditto(lambda_, lr, steps, personal_lr, personal_steps):
    """(the server's x, the personal models of the clients that took part)"""
    x, v = X0, {}
    for t in range(1, ROUNDS + 1):
        ys = []
        for i in Cohorts(0, N, COHORT).draw(t):
            y, own = x, v.get(i, x)
            for _ in range(steps):
                y = y - lr * S[i] * (y - T[i])
            for _ in range(personal_steps):
                own = own - personal_lr * (S[i] * (own - T[i]) + lambda_ * (own - x))
            v[i] = own
            ys.append(y)
        x = np.mean(ys, axis=0)
    return x, v


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize(
    ("lambda_", "personal"), [(0.0, (None, None)), (0.7, (None, None)), (0.7, (0.02, 7)), (3.0, (0.2, 1))]
)
def test_five_rounds_equal_numpy(engine, lambda_, personal):
    inputs, targets = torch.zeros(N, SIZE, dtype=torch.float64), torch.from_numpy(np.stack([T, S], 1))
    federation = fp.FederatedData(Examples(inputs, targets), [[i] for i in range(N)])
    algorithm = algorithms.ditto(lambda_, *personal, lr=0.05, steps=4)
    run = fp.simulate(
        fp.Task(Point(), loss=half_square),
        federation,
        algorithm,
        rounds=ROUNDS,
        cohort=COHORT,
        engine=engine,
        memory=(memory := InMemory()),
    )
    assert run.engine.startswith(engine)
    x, v = ditto(lambda_, 0.05, 4, personal[0] or 0.05, personal[1] or 4)
    np.testing.assert_allclose(run.state["w"], x, rtol=0, atol=1e-12)
    assert {i for i in range(N) if memory.get(i)} == v.keys()
    assert len(v) > COHORT
    for i, own in v.items():
        np.testing.assert_allclose(run.client_state(i)["w"], own, rtol=0, atol=1e-12)
    assert all(np.array_equal(run.client_state(i)["w"], run.state["w"]) for i in range(N) if i not in v)


def test_a_large_lambda_keeps_the_personal_model_at_the_servers():
    """At lambda = 1/eta a step lands on x - eta grad L(v): v is one gradient step away from x."""
    x, v = X0, T[0] + 5
    corrected = algorithms.ditto(20.0, lr=0.05).personal.correct(
        {"w": torch.from_numpy(S[0] * (v - T[0]))},
        {"w": torch.from_numpy(v)},
        {"w": torch.from_numpy(x)},
        {},
        {},
    )["w"]
    np.testing.assert_allclose(v - 0.05 * corrected.numpy(), x - 0.05 * S[0] * (v - T[0]), rtol=0, atol=1e-12)
