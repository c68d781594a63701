"""Recycled layers: against NumPy, on every engine, resumed bit for bit, and what refuses them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flower_nodes import BASE, run_on_nodes

from fedpara.engines.program import make_program
from fedpara.engines.rng import numpy_rng
from fedpara.engines.server.aggregation import Aggregator
from fedpara.engines.setup.recycling import DRAWN, RECYCLING, UPDATE, layers_of
from fedpara.errors import ConfigError
from fedpara.experiments import resume, run
from fedpara.experiments.build import build
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint

RECYCLING_RUN = replace(BASE, model="deep-mlp", recycle=1, engine="sequential", rounds=5, lr=0.1, clip=1.0)
SETTINGS = {
    "fedpara": {},
    "original": {"scheme": "original", "recycle": 2},
    "pfedpara": {"scheme": "pfedpara", "personal": True},
    "fedadam": {"algorithm": "fedadam"},
    "lossy": {"link_up": "topk(0.1, feedback=True)", "link_down": "int8"},
    "differences": {"link_up": "eden", "link_down": "sign"},
}


def progress_of(folder):
    return final_checkpoint(folder).progress


def numpy_state(state):
    return {name: tensor.numpy().astype(np.float64) for name, tensor in state.items()}


@pytest.mark.parametrize("change", [{}, {"scheme": "original", "recycle": 2}], ids=["fedpara", "original"])
def test_rounds_equal_numpy(tmp_path, monkeypatch, change):
    """u of a drawn layer is the last one; the next layers are drawn by ||x|| / ||u||."""
    experiment = replace(RECYCLING_RUN, **change)
    program = make_program(build(experiment).task.model)
    layers = list(layers_of(program).values())
    assert len(layers) == 3
    arrived, add = [], Aggregator.add

    def spy(self, client, update, buffers):
        arrived.append((self._weights[client], numpy_state(update.y)))
        add(self, client, update, buffers)

    monkeypatch.setattr(Aggregator, "add", spy)
    x, u, drawn = numpy_state(program.start(program.shared)), {}, set()
    for t in range(1, experiment.rounds + 1):
        arrived.clear()
        if t == 1:
            run(replace(experiment, rounds=1), tmp_path / "a")
        else:
            resume(tmp_path / "a", rounds=t)
        skipped = {name for i in drawn for name in layers[i]}
        weights, states = zip(*arrived, strict=True)
        mean = {name: np.average([y[name] for y in states], axis=0, weights=weights) for name in x}
        for name in skipped:
            assert all(np.array_equal(y[name], x[name].astype(np.float32)) for y in states), "not sent"
        u = {name: u[name] if name in skipped else mean[name] - x[name] for name in x}
        x = {name: x[name] + u[name] for name in x}
        progress = progress_of(tmp_path / "a")
        for name in x:
            np.testing.assert_allclose(progress.x[name].numpy(), x[name], rtol=1e-5, atol=1e-6)
        x = numpy_state(progress.x)
        # Once more in float32, so that rounding does not add up over the rounds.
        u = numpy_state(progress.server[UPDATE]) | {
            n: v for n, v in u.items() if n not in progress.server[UPDATE]
        }
        p = np.array([norm(x, names) / norm(u, names) for names in layers])
        chosen = numpy_rng(experiment.seed, "recycle", t).choice(3, experiment.recycle, False, p / p.sum())
        drawn = set(chosen.tolist())
        assert progress.server[RECYCLING][DRAWN].tolist() == [i in drawn for i in range(3)]


def norm(state, names):
    return np.sqrt(sum((state[name] ** 2).sum() for name in names))


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_resuming_gives_the_same_bits(tmp_path, change):
    experiment = replace(RECYCLING_RUN, **change)
    run(replace(experiment, rounds=3), tmp_path / "parts")
    parts = resume(tmp_path / "parts", rounds=5)
    whole = run(experiment, tmp_path / "whole")
    assert whole.metrics[-1] == parts.metrics[-1]
    one, other = progress_of(tmp_path / "parts"), progress_of(tmp_path / "whole")
    assert all(torch.equal(one.x[name], tensor) for name, tensor in other.x.items())
    assert all(torch.equal(one.server[UPDATE][name], t) for name, t in other.server[UPDATE].items())


@pytest.mark.parametrize("name", ["fedpara", "lossy"])
def test_engines_agree(tmp_path, name):
    for engine in ("sequential", "batched"):
        run(replace(RECYCLING_RUN, **SETTINGS[name], engine=engine), tmp_path / engine)
    one, other = (progress_of(tmp_path / engine) for engine in ("sequential", "batched"))
    assert torch.equal(one.server[RECYCLING][DRAWN], other.server[RECYCLING][DRAWN])
    assert one.bytes_up == other.bytes_up
    if name == "fedpara":
        for key in one.x:
            torch.testing.assert_close(one.x[key], other.x[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["pfedpara", "lossy", "differences"])
def test_flower_nodes_give_the_same_bits(tmp_path, name):
    experiment = replace(RECYCLING_RUN, **SETTINGS[name])
    run(experiment, tmp_path / "here")
    run_on_nodes(replace(experiment, engine="flower"), tmp_path / "nodes")
    here, nodes = progress_of(tmp_path / "here"), progress_of(tmp_path / "nodes")
    assert all(torch.equal(here.x[key], nodes.x[key]) for key in here.x)


def test_uploads_shrink_from_the_second_round_on(tmp_path):
    full = run(replace(RECYCLING_RUN, recycle=0), tmp_path / "full").metrics
    some = run(replace(RECYCLING_RUN, recycle=2), tmp_path / "some").metrics
    assert some[0]["up"] == full[0]["up"]
    assert all(less["up"] < 0.95 * whole["up"] for less, whole in zip(some[1:], full[1:], strict=True))
    extra = {less["down"] - whole["down"] for less, whole in zip(some, full, strict=True)}
    assert len(extra) == 1
    assert 0 < extra.pop() < 1000, "which layers were drawn"


BAD = {
    "too many": ({"recycle": 3}, "this model shares 3 layers: expected 1 to 2"),
    "negative": ({"recycle": -1}, "recycle is -1"),
    "scaffold": ({"algorithm": "scaffold"}, "use fedavg, fedprox or fedadam"),
    "feddyn": ({"algorithm": "feddyn"}, "use fedavg, fedprox or fedadam"),
    "rotate": ({"rotate": True}, "rotate needs every layer"),
    "robust": ({"robust": "median"}, "robust needs every layer"),
    "refit": ({"products": "refit"}, "products needs every layer"),
    "gammas": ({"gammas": "0.1, 0.3", "gamma": None}, "gammas needs every layer"),
    "secure": ({"secure": "secagg"}, "secure needs every layer"),
    "privacy": (
        {"sampler": "poisson", "weights": "uniform", "privacy": "user(noise=1.0, clip=0.3)"},
        "privacy needs every layer",
    ),
}


@pytest.mark.parametrize(("change", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_leaves_no_folder(tmp_path, change, expected):
    with pytest.raises(ConfigError, match=expected):
        lay_out(replace(RECYCLING_RUN, **change), tmp_path / "a")
    assert not (tmp_path / "a").exists()
