"""Golden and contracts: the mean of composed weights against NumPy, and the refit of its factors."""

import numpy as np
import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara.algorithms import Update, fedavg
from fedpara.engines.program import make_program
from fedpara.engines.server.aggregation import Aggregator
from fedpara.engines.server.products import make_products
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError

WEIGHTS = {0: 3.0, 1: 1.0, 2: 2.0}


def numpy_weight(scheme: str, kernel: bool, f: dict[str, np.ndarray]) -> np.ndarray:
    def inner(i: str) -> np.ndarray:
        if kernel:
            return np.einsum("oa,abhw,ib->oihw", f[f"x{i}"], f[f"t{i}"], f[f"y{i}"])
        return f[f"x{i}"] @ f[f"y{i}"].T

    return inner("") if scheme == "lowrank" else inner("1") * inner("2")


def a_model(scheme, kernel):
    torch.manual_seed(0)
    layer = nn.Conv2d(12, 16, 3) if kernel else nn.Linear(20, 24)
    return fp.factorize(nn.Sequential(layer), (fp.LowRank if scheme == "lowrank" else fp.FedPara)(gamma=0.3))


def session_of(model, algorithm=None, share="all", link=None):
    return Session(make_program(model, share), algorithm or fedavg(), link or fp.Link(), 0)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("scheme", ["lowrank", "fedpara"])
def test_golden_error_and_refit_against_numpy(scheme, kernel):
    """One client of four is lost: the mean is over the weights that arrived."""
    session = session_of(a_model(scheme, kernel))
    x = session.program.start(session.program.shared)
    torch.manual_seed(1)
    updates = {c: {n: t + 0.3 * torch.randn_like(t) for n, t in x.items()} for c in WEIGHTS}

    def factors(state):
        return {
            n.rpartition(".")[2]: t.double().numpy() for n, t in state.items() if n.startswith("0.weight.")
        }

    def weight(state):
        return numpy_weight(scheme, kernel, factors(state))

    total = sum(WEIGHTS.values())
    mean = sum(w / total * weight(updates[c]) for c, w in WEIGHTS.items())
    averaged = {n: sum(w / total * updates[c][n].double() for c, w in WEIGHTS.items()) for n in x}
    error = np.linalg.norm(mean - weight(averaged))

    made = {}
    for products in ("mean", "refit"):
        aggregator = Aggregator(
            session.algorithm,
            x,
            {**WEIGHTS, 3: 5.0},
            products=make_products(session, Settings(1, 3, products=products, aggregation_error=True)),
        )
        for client, y in updates.items():
            aggregator.add(client, Update(y, {}, 1), {})
        made[products], found = aggregator.aggregate({}, 4)[0], aggregator.error
        assert found.norm == pytest.approx(error, rel=1e-4)
        assert found.relative == pytest.approx(error / np.linalg.norm(mean), rel=1e-4)
        assert found.of_change == pytest.approx(error / np.linalg.norm(mean - weight(x)), rel=1e-4)
    assert found.refitted == pytest.approx(np.linalg.norm(mean - weight(made["refit"])), rel=1e-3)
    assert found.refitted < 0.9 * error
    assert torch.equal(made["mean"]["0.bias"], made["refit"]["0.bias"]), "dense tensors keep their mean"
    for name, t in averaged.items():
        torch.testing.assert_close(made["mean"][name], t.float())
    if scheme == "lowrank" and not kernel:
        best = np.linalg.svd(mean)[1][made["refit"]["0.weight.x"].shape[1] :]
        assert found.refitted == pytest.approx(np.linalg.norm(best), rel=0.05), "nearly the best of its rank"


def test_one_client_has_no_error():
    session = session_of(a_model("fedpara", True))
    x = session.program.start(session.program.shared)
    aggregator = Aggregator(
        session.algorithm, x, {0: 2.0}, products=make_products(session, Settings(1, 1, products="refit"))
    )
    aggregator.add(0, Update({n: t + 0.1 for n, t in x.items()}, {}, 2), {})
    made = aggregator.aggregate({}, 1)[0]
    assert aggregator.error.relative < 1e-6
    torch.testing.assert_close(made, {n: t + 0.1 for n, t in x.items()})


@pytest.mark.parametrize("link", [fp.Link(), fp.Link(up="int4", down="int8")])
def test_refit_in_every_engine_and_after_a_resume(world, engine, link, tmp_path):
    """The same bits after a resume, an error in every round, and never a larger one after the refit."""
    options = {"products": "refit", "aggregation_error": True, "engine": engine, "link": link}
    whole = world.simulate(world.model("fedpara"), rounds=3, **options)
    first = world.simulate(
        world.model("fedpara"), rounds=3, out=tmp_path / "r", on_round=lambda r: r.number < 2, **options
    )
    assert len(first.rounds) == 2
    rest = world.simulate(world.model("fedpara"), rounds=3, out=tmp_path / "r", **options)
    assert len(rest.rounds) == 3
    assert all(torch.equal(t, rest.state[n]) for n, t in whole.state.items())
    for a, b in zip(whole.rounds, rest.rounds, strict=True):
        assert a.aggregation_error == b.aggregation_error
        assert 0 < a.aggregation_error.refitted <= a.aggregation_error.norm


def test_measuring_leaves_the_bits_of_a_run(world):
    for algorithm in ("fedavg", "scaffold", "fedadam"):
        plain, measured = (
            world.simulate(world.model("fedpara"), world.algorithm(algorithm), aggregation_error=on)
            for on in (False, True)
        )
        assert all(torch.equal(t, measured.state[n]) for n, t in plain.state.items())
        assert plain.rounds[0].aggregation_error is None
        assert measured.rounds[0].aggregation_error.norm > 0


def test_rotation_has_no_error(world):
    """One factor of each weight trains per round, and a weight is linear in one factor."""
    run = world.simulate(world.model("fedpara"), rotate=True, aggregation_error=True)
    assert all(result.aggregation_error.relative < 1e-6 for result in run.rounds)


@pytest.mark.parametrize(
    ("scheme", "algorithm", "options", "words"),
    [
        ("original", "fedavg", {"products": "refit"}, "this model has none"),
        ("pfedpara", "fedavg", {"products": "refit"}, "are private: use fedpara or lowrank"),
        ("pfedpara", "fedavg", {"aggregation_error": True}, "are private"),
        ("fedpara", "fedadam", {"products": "refit"}, "fedadam steps from it"),
        ("fedpara", "fedavg", {"products": "refit", "rotate": True}, "products 'refit' and rotate"),
        (
            "fedpara",
            "fedavg",
            {"aggregation_error": True, "robust": "median"},
            "aggregation_error and robust",
        ),
        ("fedpara", "fedavg", {"products": "sum"}, "expected one of mean, refit"),
        ("fedpara", "fedavg", {"products": "refit", "share": "none"}, "this model has none"),
    ],
)
def test_what_cannot_be_refitted_is_refused_before_a_folder(
    world, scheme, algorithm, options, words, tmp_path
):
    with pytest.raises(ConfigError, match=words):
        world.simulate(world.model(scheme), world.algorithm(algorithm), out=tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()
