"""Properties: hostile updates within a defence's promise move the result no farther than honest ones could."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.algorithms import FromMean, Update, Visit
from fedpara.attacks import gauge
from fedpara.parameterization import FedPara, LowRank, PFedPara, write
from fedpara.robust import DEFENCES, Blocks, robust_mean

ALIKE = FromMean(lambda x, server, mean, clients: (mean.y, server), weights="uniform")
D = 4


def result(name, u, own=None, **options):
    """The defence's move of a model at 0."""
    updates = [Update({"w": torch.from_numpy(row)}, {}, 1) for row in u]
    trusted = None if own is None else {"w": torch.from_numpy(own)}
    x = {"w": torch.zeros(D, dtype=torch.float64)}
    mean, *_ = robust_mean(DEFENCES[name](**options), Blocks(), x, updates, [{}] * len(u), ALIKE, trusted)
    return mean.y["w"].numpy()


@st.composite
def rounds(draw, most):
    """(honest updates, hostile ones): n of 7 to 12, at most floor(`most` n) and fewer than half of them hostile.

    Hostile updates are random of any length, all the same, against the honest mean, or just outside the honest spread.
    """
    n = draw(st.integers(7, 12))
    f = draw(st.integers(0, min(int(most * n), (n - 1) // 2)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    honest = generator.normal(size=(n - f, D)) + generator.normal(size=D)
    size = draw(st.sampled_from([1e-3, 1.0, 10.0, 1e6]))
    centre, apart = honest.mean(0), honest.std(0)
    hostile = {
        "random": generator.normal(size=(f, D)) * size,
        "same": np.tile(generator.normal(size=D) * size, (f, 1)),
        "against": np.tile(-size * centre, (f, 1)),
        "outside": np.tile(centre - 1.5 * apart, (f, 1)),
    }
    return honest, hostile[draw(st.sampled_from(sorted(hostile)))]


def diameter(u):
    return np.linalg.norm(u[:, None] - u[None], axis=-1).max()


@settings(max_examples=60, deadline=None)
@given(rounds(most=0.5))
def test_the_median_stays_between_honest_values(case):
    honest, hostile = case
    moved = result("median", np.concatenate([honest, hostile]))
    assert (moved >= honest.min(0) - 1e-9).all()
    assert (moved <= honest.max(0) + 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(rounds(most=0.3))
def test_the_trimmed_mean_stays_between_honest_values(case):
    honest, hostile = case
    moved = result("trimmed-mean", np.concatenate([honest, hostile]))
    assert (moved >= honest.min(0) - 1e-9).all()
    assert (moved <= honest.max(0) + 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(rounds(most=0.2), st.sampled_from(["krum", "multi-krum"]))
def test_krum_stays_near_honest_updates(case, name):
    """A chosen update has an honest neighbour among its n - f - 2 nearest, and no larger score than some honest one."""
    honest, hostile = case
    n = len(honest) + len(hostile)
    moved = result(name, np.concatenate([honest, hostile]), share=0.2)
    bound = (1 + np.sqrt(n)) * diameter(honest)
    assert np.linalg.norm(honest - moved, axis=1).min() <= bound + 1e-9


@settings(max_examples=60, deadline=None)
@given(rounds(most=0.45))
def test_the_geometric_median_has_a_breakdown_point_of_half(case):
    """||v - c|| <= 2 (1 - a) / (1 - 2 a) max ||u_i - c|| over honest i, for a hostile share a (Lopuhaa, 1991)."""
    honest, hostile = case
    a = len(hostile) / (len(honest) + len(hostile))
    moved = result("rfa", np.concatenate([honest, hostile]), steps=1000)
    centre = honest.mean(0)
    spread = np.linalg.norm(honest - centre, axis=1).max()
    assert np.linalg.norm(moved - centre) <= 2 * (1 - a) / (1 - 2 * a) * spread * 1.01


@settings(max_examples=60, deadline=None)
@given(rounds(most=0.45), st.sampled_from(["norm-clip", "flame", "auto"]))
def test_clipping_bounds_the_move_by_the_longest_honest_update(case, name):
    honest, hostile = case
    moved = result(name, np.concatenate([honest, hostile]))
    assert np.linalg.norm(moved) <= np.linalg.norm(honest, axis=1).max() * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(rounds(most=0.3))
def test_centred_clipping_stays_within_the_honest_scale(case):
    honest, hostile = case
    moved = result("centred-clip", np.concatenate([honest, hostile]))
    assert np.linalg.norm(moved) <= 4 * np.linalg.norm(honest, axis=1).max()


@settings(max_examples=60, deadline=None)
@given(rounds(most=0.5), st.booleans())
def test_fltrust_moves_no_farther_than_the_server_itself(case, alone):
    """For any number of hostile clients: here also for nobody else."""
    honest, hostile = case
    own = honest.mean(0)
    u = hostile if alone and len(hostile) else np.concatenate([honest, hostile])
    assert np.linalg.norm(result("fltrust", u, own=own)) <= np.linalg.norm(own) * (1 + 1e-9)


def longest(u):
    return np.linalg.norm(u, axis=1).max()


PROMISES = {
    "median": (0.5, {}, diameter, np.sqrt(D)),
    "trimmed-mean": (0.3, {}, diameter, np.sqrt(D)),
    "krum": (0.2, {"share": 0.2}, diameter, 6.0),
    "multi-krum": (0.2, {"share": 0.2}, diameter, 6.0),
    "rfa": (0.4, {"steps": 1000}, diameter, 7.0),
    "centred-clip": (0.3, {}, longest, 5.0),
    "norm-clip": (0.5, {}, longest, 2.0),
    "flame": (0.5, {}, longest, 2.0),
    "auto": (0.5, {}, longest, 2.0),
    "fltrust": (0.5, {}, longest, 2.0),
}
"""Defence: (hostile share it withstands, options, unit of the honest updates, how many units it may move)."""


def test_every_defence_has_a_promise():
    assert {*PROMISES, "mean"} == {*DEFENCES}


@pytest.mark.parametrize("name", PROMISES)
def test_hostile_updates_within_the_promise_move_the_result_by_the_honest_spread(name):
    most, options, unit, times = PROMISES[name]

    @settings(max_examples=40, deadline=None)
    @given(rounds(most))
    def holds(case):
        honest, hostile = case
        own = honest.mean(0) if name == "fltrust" else None
        without = result(name, honest, own, **options)
        moved = result(name, np.concatenate([honest, hostile]), own, **options)
        assert np.linalg.norm(moved - without) <= times * unit(honest) * (1 + 1e-6)

    holds()


@pytest.mark.parametrize(
    ("name", "hostile"),
    [("mean", 1), ("median", 6), ("trimmed-mean", 4), ("rfa", 6), ("krum", 6), ("multi-krum", 6)],
)
def test_one_more_than_promised_breaks_it(name, hostile):
    """The bounds above are not loose: with 11 clients, these many hostile ones take the result anywhere."""
    u = np.random.default_rng(0).normal(size=(11, D))
    u[:hostile] = 1e6
    assert np.linalg.norm(result(name, u)) > 1e4


FORMS = {
    "matrix": write(FedPara(rank=2), (12, 14)),
    "kernel": write(FedPara(rank=2), (8, 7, 3, 3)),
    "low rank": write(LowRank(rank=3), (12, 14)),
    "tanh": write(FedPara(rank=2, nonlinearity="tanh"), (12, 14)),
    "private half": write(PFedPara(rank=2), (12, 14)),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", DEFENCES)
def test_rescaled_factors_change_nothing(name, kind):
    """The gauge attack sends other factors of the same weights: the next composed weights are the same."""
    form, generator = FORMS[kind], torch.Generator().manual_seed(0)
    forms = {"w": form}
    shared = {f"w.{f}": s for f, s in form.factors.items() if f not in form.private}

    def near(x, size):
        return {n: t + size * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in x.items()}

    x = near({n: torch.zeros(s, dtype=torch.float64) for n, s in shared.items()}, 1.0)
    x["bias"] = torch.zeros(12, dtype=torch.float64)
    ys, own = [near(x, 0.1) for _ in range(9)], near(x, 0.1)
    attack = gauge(100.0).send
    rescaled = [attack(x, y, Visit(i, 1, 1, 0.1, i), forms) if i % 3 == 0 else y for i, y in enumerate(ys)]
    made = []
    for states in (ys, rescaled):
        updates = [Update(y, {}, 1) for y in states]
        mean, *_ = robust_mean(DEFENCES[name](), Blocks(forms), x, updates, [{}] * 9, ALIKE, own)
        made.append({block.name: block.of(mean.y) for block in Blocks(forms).over(x)})
    moved = (made[0]["w"] - next(Blocks(forms).over(x)).of(x)).norm()
    assert not torch.equal(
        rescaled[0]["w.x" + form.scheme.suffixes[0]], ys[0]["w.x" + form.scheme.suffixes[0]]
    )
    assert (made[0]["w"] - made[1]["w"]).norm() <= 1e-6 * moved
    torch.testing.assert_close(made[0]["bias"], made[1]["bias"])
    assert moved > 0
