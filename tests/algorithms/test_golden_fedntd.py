"""Golden: FedNTD through the engines, against a NumPy version, for softmax regression on clients of different sizes.

For the logits z of an example with the true class t, the gradient of the loss in z is
p - e_t + beta tau (q~ - q~_g), where q~ and q~_g are 0 at t.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.errors import ConfigError
from fedpara.privacy import Example

SIZES, FEATURES, CLASSES, ROUNDS, COHORT, STEPS, ETA = (7, 4, 9, 5), 6, 5, 4, 3, 4, 0.3
_rng = np.random.default_rng(0)
X = [_rng.normal(size=(n, FEATURES)) for n in SIZES]
Y = [_rng.integers(0, CLASSES, size=n) for n in SIZES]
START = _rng.normal(size=(CLASSES, FEATURES))


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def others(z, true, tau):
    """Softmax over all classes but the true one."""
    hidden = (z / tau).copy()
    hidden[np.arange(len(z)), true] = -np.inf
    return softmax(hidden)


def reference(beta, tau):
    w = START
    for t in range(1, ROUNDS + 1):
        cohort, trained = Cohorts(0, len(SIZES), COHORT).draw(t), []
        for i in cohort:
            y, taught = w, others(X[i] @ w.T, Y[i], tau)
            for _ in range(STEPS):
                z = X[i] @ y.T
                in_z = softmax(z) - np.eye(CLASSES)[Y[i]] + beta * tau * (others(z, Y[i], tau) - taught)
                y = y - ETA * in_z.T @ X[i] / SIZES[i]
            trained.append(SIZES[i] * y)
        w = sum(trained) / sum(SIZES[i] for i in cohort)
    return w


def linear():
    model = nn.Linear(FEATURES, CLASSES, bias=False).double()
    model.weight.data = torch.from_numpy(START.copy())
    return model


def simulate(algorithm, model, engine, **options):
    rows = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    examples = Examples(torch.from_numpy(np.concatenate(X)), torch.from_numpy(np.concatenate(Y)))
    federation = fp.FederatedData(examples, rows)
    given = {"rounds": ROUNDS, "cohort": COHORT, **options}
    return fp.simulate(fp.Task(model), federation, algorithm, engine=engine, **given)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize(("beta", "tau"), [(0.0, 1.0), (1.0, 1.0), (0.4, 3.0)])
def test_four_rounds_equal_numpy(engine, beta, tau):
    algorithm = algorithms.fedntd(beta, tau, lr=ETA, steps=STEPS, batch_size=max(SIZES))
    run = simulate(algorithm, linear(), engine)
    assert run.engine.startswith(engine)
    np.testing.assert_allclose(run.state["weight"], reference(beta, tau), rtol=0, atol=1e-12)


def normalised(**options):
    return nn.Sequential(linear(), nn.BatchNorm1d(CLASSES, **options).double())


def test_the_received_model_is_in_evaluation_mode():
    seen = []

    def distill(output, targets, received):
        seen.append(received.detach().clone())
        return 0 * output.sum(1)

    model = normalised()
    algorithm = replace(algorithms.fedavg(lr=ETA, steps=STEPS, batch_size=max(SIZES)), distill=distill)
    simulate(algorithm, model, "sequential", rounds=1, cohort=1)
    start = model.eval()(torch.from_numpy(X[Cohorts(0, len(SIZES), 1).draw(1)[0]])).detach()
    for received in seen[-STEPS:]:  # the order of a batch differs from step to step
        np.testing.assert_allclose(received.sort(0).values, start.sort(0).values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", ["all", "all but 1", "all but 0"])
def test_engines_agree_on_statistics_and_private_parts(share):
    algorithm = algorithms.fedntd(2.0, lr=ETA, steps=STEPS, batch_size=7)
    runs = [simulate(algorithm, normalised(), engine, share=share) for engine in ("sequential", "batched")]
    assert runs[1].engine.startswith("batched"), runs[1].engine
    plain = simulate(replace(algorithm, distill=None), normalised(), "sequential", share=share)
    for client in range(len(SIZES)):
        one, other, without = (run.client_state(client) for run in (*runs, plain))
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-10)
        assert not torch.equal(one["0.weight"], without["0.weight"])


def test_a_norm_without_statistics_trains_one_client_after_another():
    algorithm = algorithms.fedntd(lr=ETA, steps=STEPS, batch_size=7)
    run = simulate(algorithm, normalised(track_running_stats=False), "batched", rounds=1)
    assert "the received model, whose '1' normalises by the batch" in run.engine


def test_a_mistake_in_the_term_is_named_before_the_run():
    for wrong, message in (
        (lambda output, targets: output, "distill failed.*distill\\(output, targets, received\\)"),
        (lambda output, targets, received: output.sum(), "distill"),
    ):
        with pytest.raises(ConfigError, match=message):
            simulate(replace(algorithms.fedavg(lr=ETA), distill=wrong), linear(), "sequential")


def test_gradients_of_single_examples_would_leave_the_term_out():
    with pytest.raises(ConfigError, match="fedntd adds a term"):
        simulate(
            algorithms.fedntd(lr=ETA, steps=STEPS, batch_size=2),
            linear(),
            "sequential",
            privacy=Example(noise=1.0, clip=1.0),
        )
