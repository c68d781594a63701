"""One factor of every weight per round: averaging is exact, only that factor moves, and every engine agrees."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flower_nodes import BASE, run_on_nodes

from fedpara.engines.server.aggregation import Aggregator
from fedpara.errors import ConfigError
from fedpara.experiments import resume, run
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.summary import read_run

ROTATING = replace(BASE, rotate=True, engine="sequential", rounds=5, lr=0.3)
SCHEMES = {
    "fedpara": {},
    "lowrank": {"scheme": "lowrank"},
    "kernels": {"model": "cnn", "steps": 1},
    "pfedpara": {"scheme": "pfedpara", "personal": True, "lr": 0.05},
    "lossy": {"link_up": "int8", "link_down": "float16"},
    "private": {
        "sampler": "poisson",
        "weights": "uniform",
        "privacy": "user(noise=1.0, clip=0.3)",
        "privacy_seed": 1,
    },
}


def x_of(folder):
    return final_checkpoint(folder).progress.x


def composed(factors):
    """W = (X1 Y1^T) * (X2 Y2^T), in NumPy."""
    x1, y1, x2, y2 = (factors[name].astype(np.float64) for name in ("x1", "y1", "x2", "y2"))
    return (x1 @ y1.T) * (x2 @ y2.T)


@pytest.mark.parametrize("rotate", [True, False])
def test_the_mean_of_weights_is_the_weight_of_means(tmp_path, monkeypatch, rotate):
    """Of the updates that arrive in a round. Without rotation the two differ."""
    arrived, add = [], Aggregator.add

    def spy(self, client, update, buffers):
        arrived.append((self._weights[client], {n: t.numpy() for n, t in update.y.items()}))
        add(self, client, update, buffers)

    monkeypatch.setattr(Aggregator, "add", spy)
    run(replace(ROTATING, rotate=rotate, rounds=1), tmp_path / "a")

    def factors(state):
        return {name.rpartition(".")[2]: t for name, t in state.items() if name.startswith("fc1.weight.")}

    weights, states = zip(*arrived, strict=True)
    mean_of_weights = np.average([composed(factors(y)) for y in states], axis=0, weights=weights)
    mean = {
        name: np.average([y[name].astype(np.float64) for y in states], axis=0, weights=weights)
        for name in states[0]
    }
    gap = np.abs(mean_of_weights - composed(factors(mean))).max()
    moved = np.abs(composed(factors(states[0])) - composed(factors(states[1]))).max()
    assert moved > 1e-4
    assert gap < 1e-14 if rotate else gap > 1e-5
    after = composed(factors({name: tensor.numpy() for name, tensor in x_of(tmp_path / "a").items()}))
    if rotate:
        np.testing.assert_allclose(after, mean_of_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("change", SCHEMES.values(), ids=SCHEMES)
def test_one_factor_moves_per_round_and_resuming_gives_the_same_bits(tmp_path, change):
    experiment = replace(ROTATING, **change)
    folder = tmp_path / "parts"
    before = None
    for t in range(1, experiment.rounds + 1):
        if t == 1:
            run(replace(experiment, rounds=1), folder)
        else:
            resume(folder, rounds=t)
        x = x_of(folder)
        if before is not None:
            moved = {name for name in x if not torch.equal(x[name], before[name])}
            weights = {name.rpartition(".")[0] for name in x if name.rpartition(".")[2][:2] in FACTORS}
            for weight in weights:
                own = sorted(name for name in x if name.rpartition(".")[0] == weight)
                turned = [name for name in own if name in moved]
                assert len(turned) <= 1, turned
            assert any(name.endswith("bias") for name in moved)
        before = x
    run(experiment, tmp_path / "whole")
    assert all(torch.equal(x[name], tensor) for name, tensor in x_of(tmp_path / "whole").items())
    assert read_run(tmp_path / "whole").metrics[-1] == read_run(folder).metrics[-1]


FACTORS = ("x", "y", "x1", "y1", "t1", "x2", "y2", "t2", "t")


@pytest.mark.parametrize("name", ["fedpara", "pfedpara", "kernels"])
def test_engines_agree(tmp_path, name):
    for engine in ("sequential", "batched"):
        run(replace(ROTATING, **SCHEMES[name], engine=engine), tmp_path / engine)
    one, other = x_of(tmp_path / "sequential"), x_of(tmp_path / "batched")
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["pfedpara", "lossy", "private"])
def test_flower_nodes_give_the_same_bits(tmp_path, name):
    experiment = replace(ROTATING, **SCHEMES[name])
    run(experiment, tmp_path / "here")
    run_on_nodes(replace(experiment, engine="flower"), tmp_path / "nodes")
    here, nodes = x_of(tmp_path / "here"), x_of(tmp_path / "nodes")
    assert all(torch.equal(here[key], nodes[key]) for key in here)


def test_uploads_shrink_and_downloads_do_not(tmp_path):
    full = run(replace(ROTATING, rotate=False, rounds=4), tmp_path / "full")
    turns = run(replace(ROTATING, rounds=4), tmp_path / "turns")
    assert 3 < full.bytes_up / turns.bytes_up < 4
    assert full.bytes_down == turns.bytes_down


BAD = {
    "original": ({"scheme": "original"}, "shares no factorized weight"),
    "tanh": ({"nonlinearity": "tanh"}, "is not linear in a factor"),
    "fedadam": ({"algorithm": "fedadam"}, "use fedavg or fedprox"),
    "scaffold": ({"algorithm": "scaffold"}, "use fedavg or fedprox"),
    "decay": ({"weight_decay": 0.1}, "set weight_decay to 0"),
    "adamw": ({"optimizer": "adamw(weight_decay=0.1)"}, "or use sgd"),
    "kept": ({"keep_optimizer": True}, "keep_optimizer needs all factors"),
    "jacobian": ({"jacobian": 1.0}, "jacobian needs all factors"),
}


@pytest.mark.parametrize(("change", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_leaves_no_folder(tmp_path, change, expected):
    with pytest.raises(ConfigError, match=expected):
        lay_out(replace(ROTATING, **change), tmp_path / "a")
    assert not (tmp_path / "a").exists()
