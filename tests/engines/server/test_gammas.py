"""Golden and contracts: a gamma per client."""

import numpy as np
import pytest
import torch

import fedpara as fp
from fedpara import algorithms
from fedpara.engines.server.broadcast import broadcast
from fedpara.engines.server.levels import cut, make_levels, mean_of_nested
from fedpara.engines.server.rounds import initial_progress
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError

GAMMAS = (0.0, 0.2, 0.4)


def large(world, scheme=fp.FedPara):
    torch.manual_seed(0)
    return fp.factorize(fp.models.mlp(64, hidden=32, classes=10), scheme(gamma=max(GAMMAS)))


def test_golden_each_entry_is_the_mean_over_those_who_hold_it():
    """Against NumPy: absent entries are NaN, and an entry that nobody holds stays."""
    rng, sizes, weights = np.random.default_rng(0), (2, 3, 1), (3.0, 1.0, 2.0)
    x = {"w.t1": torch.from_numpy(rng.normal(size=(4, 4, 3))).float(), "b": torch.zeros(2)}
    parts, stacked = [], np.full((3, 4, 4, 3), np.nan)
    for i, r in enumerate(sizes):
        values = rng.normal(size=(r, r, 3))
        stacked[i, :r, :r] = values
        parts.append({"w.t1": torch.from_numpy(values).float(), "b": torch.full((2,), float(i))})
    held = ~np.isnan(stacked) * np.array(weights)[:, None, None, None]
    total = np.nansum(stacked * np.array(weights)[:, None, None, None], axis=0)
    expected = np.where(held.sum(0) > 0, total / np.maximum(held.sum(0), 1e-9), x["w.t1"].numpy())
    made = mean_of_nested(x, parts, weights)
    np.testing.assert_allclose(made["w.t1"].numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(made["b"].numpy(), (0 * 3 + 1 * 1 + 2 * 2) / 6)


@pytest.mark.parametrize("scheme", [fp.FedPara, fp.LowRank])
def test_a_client_has_the_model_of_its_gamma(world, scheme):
    """Its shapes are those of a model that is factorized at its gamma; its values are the server's first columns."""
    session = world.session(large(world, scheme))
    levels = make_levels(session, Settings(1, 3, gammas=GAMMAS), False)
    x = session.program.start(session.program.shared)
    for client, gamma in enumerate((*GAMMAS, *GAMMAS)):
        own = levels.sessions[levels.gamma_of(client)]
        alone = fp.factorize(fp.models.mlp(64, hidden=32, classes=10), scheme(gamma=gamma))
        assert {n: t.shape for n, t in own.program.initial.items()} == {
            n: t.shape for n, t in alone.state_dict().items()
        }
        part = cut(x, own.program)
        for name, tensor in part.items():
            assert torch.equal(tensor, x[name][tuple(slice(n) for n in tensor.shape)])
    ranks = [
        levels.sessions[gamma].program.initial["fc1.weight.x" + scheme.suffixes[0]].shape[1]
        for gamma in GAMMAS
    ]
    assert ranks == sorted(set(ranks)), "three different ranks"


def test_one_gamma_gives_the_bits_of_a_plain_run(world):
    plain, same = (world.simulate(large(world), gammas=g) for g in (None, [max(GAMMAS)] * 2))
    assert all(torch.equal(t, same.state[n]) for n, t in plain.state.items())
    assert plain.bytes == same.bytes


@pytest.mark.parametrize("link", [fp.Link(), fp.Link(up="int4", down="int8")])
def test_every_engine_meters_what_travels_and_resumes(world, engine, link, tmp_path):
    options = {"gammas": GAMMAS, "engine": engine, "link": link, "cohort": 4, "lost": 0.2}
    whole = world.simulate(large(world), rounds=4, **options)
    world.simulate(large(world), rounds=4, out=tmp_path / "r", on_round=lambda r: r.number < 2, **options)
    rest = world.simulate(large(world), rounds=4, out=tmp_path / "r", **options)
    assert all(torch.equal(t, rest.state[n]) for n, t in whole.state.items())
    session = world.session(large(world), link=link)
    levels = make_levels(session, Settings(1, 3, gammas=GAMMAS), False)
    down = 0
    for result in whole.rounds:
        for client in result.cohort:
            own = levels.sessions[levels.gamma_of(client)]
            down += len(broadcast(own, initial_progress(own), result.number)[0])
    assert whole.progress.bytes_down == down


def test_engines_agree(world):
    runs = [
        world.simulate(large(world), gammas=GAMMAS, engine=e, rounds=2, cohort=5)
        for e in ("sequential", "batched")
    ]
    assert [run.engine.split(":")[0] for run in runs] == ["sequential", "batched"]
    for name, tensor in runs[0].state.items():
        torch.testing.assert_close(runs[1].state[name], tensor, rtol=1e-4, atol=1e-5)
    assert runs[0].bytes == runs[1].bytes


def test_three_gammas_converge_on_digits():
    train, test = fp.data.load("digits")
    federation = fp.data.FederatedData(train, [range(i, len(train), 6) for i in range(6)])
    torch.manual_seed(0)
    model = fp.factorize(fp.models.mlp(64, hidden=64, classes=10), fp.FedPara(gamma=0.5))
    run = fp.simulate(
        fp.engines.Task(model, test=test),
        federation,
        algorithms.fedavg(lr=0.1, epochs=2, batch_size=16),
        rounds=5,
        cohort=6,
        gammas=[0.1, 0.3, 0.5],
        engine="sequential",
        evaluate_every=5,
    )
    assert run.accuracy > 0.85


@pytest.mark.parametrize(
    ("scheme", "algorithm", "options", "words"),
    [
        ("original", "fedavg", {}, "no weight of this model has a rank that a gamma chose"),
        ("fedpara", "fedavg", {}, "has gamma 0.1: factorize the model with the largest, 0.4"),
        ("pfedpara", "fedavg", {"gammas": [0.0, 0.1]}, "private"),
        ("fedpara", "scaffold", {"gammas": [0.0, 0.1]}, "use fedavg or fedprox"),
        ("fedpara", "fedavg", {"gammas": [0.0, 0.1], "link": fp.Link(down="int4")}, "downlinks below 8 bits"),
        (
            "fedpara",
            "fedavg",
            {"gammas": [0.0, 0.1], "link": fp.Link(up="sign(feedback=True)")},
            "error feedback",
        ),
        ("fedpara", "fedavg", {"gammas": [0.0, 0.1], "products": "refit"}, "leave them out"),
        ("fedpara", "fedavg", {"gammas": [0.0, 0.1], "rotate": True}, "rotate needs the same tensors"),
        ("fedpara", "fedavg", {"gammas": [0.0, 0.1], "max_share": 0.5}, "max_share"),
        ("fedpara", "fedavg", {"gammas": [0.0, 1.1]}, "expected numbers from 0 to 1"),
    ],
)
def test_what_cannot_have_several_gammas_is_refused_before_a_folder(
    world, scheme, algorithm, options, words, tmp_path
):
    options = {"gammas": GAMMAS, **options}
    with pytest.raises(ConfigError, match=words):
        world.simulate(world.model(scheme), world.algorithm(algorithm), out=tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()
