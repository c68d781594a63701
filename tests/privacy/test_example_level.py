"""Example-level privacy: the gradient against a loop over examples, its cost, and runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flower_nodes import BASE, run_on_nodes
from torch import nn
from torch.nn import functional as F

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.engines.local.per_example import private_gradient
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import make_program
from fedpara.errors import ConfigError
from fedpara.experiments import resume, run
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.privacy import Example, epsilon
from fedpara.privacy.randomness import Noise, seeded_key

PRIVATE = replace(
    BASE, engine="sequential", privacy="example(noise=0.8, clip=0.5)", privacy_seed=1, algorithm="scaffold"
)


def x_of(folder):
    return final_checkpoint(folder).progress.x


def task_of(model):
    return fp.Task(model, test=None)


@pytest.mark.parametrize("scheme", [None, fp.FedPara(gamma=0.3), fp.PFedPara(gamma=0.3)], ids=str)
def test_the_gradient_is_that_of_a_loop_over_examples(scheme, monkeypatch):
    """Clipped one by one, over all tensors that train, in chunks and at once."""
    torch.manual_seed(0)
    model = models.mlp(6, 5, 3)
    if scheme is not None:
        fp.factorize(model, scheme, lambda *_: True, force=True)
    inputs, targets = torch.randn(7, 6), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    worker, kind = Worker(make_program(model), task_of(model)), Example(0.8, 0.5)
    total = {name: torch.zeros_like(t) for name, t in worker.parameters.items()}
    for one, target in zip(inputs, targets, strict=True):
        loss = F.cross_entropy(worker.model(one[None]), target[None])
        g = torch.autograd.grad(loss, list(worker.parameters.values()))
        norm = torch.sqrt(sum((t**2).sum() for t in g))
        for name, t in zip(total, g, strict=True):
            total[name] += t * min(1.0, 0.5 / float(norm))
    noise = Noise(seeded_key(3, 1, 2)).like(total)
    expected = {name: (t + 0.8 * 0.5 * noise[name].float()) / 7 for name, t in total.items()}
    for chunk in (1 << 26, 1):
        monkeypatch.setattr("fedpara.engines.local.per_example.CHUNK", chunk)
        made, _ = private_gradient(worker, kind, 3, 1, 2)(inputs, targets)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)


def test_one_example_moves_the_sum_by_at_most_the_clip():
    """The same seed with and without an outlier: the difference is one clipped gradient."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    worker, kind = Worker(make_program(model), task_of(model)), Example(1.0, 0.25)
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    inputs[-1] *= 1e4
    sums = []
    for count in (5, 4):
        g, _ = private_gradient(worker, kind, 0, 1, 1)(inputs[:count], targets[:count])
        sums.append(torch.cat([t.flatten() for t in g.values()]) * count)
    assert float((sums[0] - sums[1]).norm()) == pytest.approx(0.25, rel=1e-4)


def test_the_cost_counts_every_use_of_the_most_used_example():
    train, _ = data.load("digits")
    held = fp.FederatedData(train.subset(np.arange(60)), data.iid(60, clients=3, seed=0))
    model = models.mlp(64, 4, 10)

    def cost(rounds=3, **local):
        made = fp.simulate(
            task_of(model),
            held,
            algorithms.fedavg(batch_size=8, **local),
            rounds=rounds,
            cohort=3,
            privacy=Example(2.0, 1.0),
            delta=1e-3,
        )
        return made.privacy["epsilon"]

    assert cost(epochs=2) == epsilon(2.0, 1.0, 6, 1e-3)
    assert cost(steps=4) == epsilon(
        2.0, 1.0, 6, 1e-3
    )  # 20 examples: 3 batches, so 4 steps begin a second pass
    with pytest.raises(ConfigError, match="the first round of example"):
        fp.simulate(
            task_of(model),
            held,
            algorithms.fedavg(),
            rounds=1,
            cohort=1,
            privacy=Example(1.0, 1.0),
            epsilon=0.1,
        )


def test_runs_resume_and_agree_on_nodes(tmp_path):
    """With a seed, bit for bit; a batched run falls back to the sequential engine and says why."""
    run(PRIVATE, tmp_path / "whole")
    run(replace(PRIVATE, rounds=1, engine="batched"), tmp_path / "parts")
    summary = resume(tmp_path / "parts", rounds=3)
    assert "needs the gradient of every example" in summary.engine
    run_on_nodes(replace(PRIVATE, engine="flower"), tmp_path / "nodes")
    whole = x_of(tmp_path / "whole")
    for other in ("parts", "nodes"):
        assert all(torch.equal(whole[name], t) for name, t in x_of(tmp_path / other).items())
    assert summary.privacy["kind"] == "example"
    assert not summary.privacy["private"]
    fresh = run(replace(PRIVATE, privacy_seed=None), tmp_path / "fresh")
    assert fresh.privacy["private"]
    assert not all(torch.equal(whole[name], t) for name, t in x_of(tmp_path / "fresh").items())


BAD = {
    "no clip": ({"privacy": "example(noise=1.0)"}, "has noise and no clip"),
    "jacobian": ({"jacobian": 1.0, "algorithm": "fedavg"}, "leave jacobian out"),
    "batch norm": ({"model": "resnet18-tiny", "dataset": "generated:cifar10"}, "use GroupNorm"),
}


@pytest.mark.parametrize(("change", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_leaves_no_folder(tmp_path, change, expected):
    with pytest.raises(ConfigError, match=expected):
        lay_out(replace(PRIVATE, **change), tmp_path / "a")
    assert not (tmp_path / "a").exists()
