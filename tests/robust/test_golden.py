"""Golden: every defence against a NumPy computation on whole vectors, without Gram matrices."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpara.algorithms import FromMean, Update
from fedpara.robust import DEFENCES, Blocks, clustering, robust_mean
from fedpara.robust.geometry import Geometry

SHAPES = {"a": (3, 4), "b": (5,)}
WEIGHTS = np.array([4.0, 1.0, 2.0, 3.0, 2.0, 5.0, 1.0, 2.0, 3.0])
UNIFORM = FromMean(lambda x, server, mean, clients: (mean.y, server), weights="uniform")
BY_EXAMPLES = FromMean(lambda x, server, mean, clients: (mean.y, server))


def state(vector):
    split = np.split(vector, [12])
    return {
        name: torch.from_numpy(part.reshape(SHAPES[name])) for name, part in zip(SHAPES, split, strict=True)
    }


def vector(state):
    return np.concatenate([tensor.numpy().ravel() for tensor in state.values()])


@pytest.fixture
def round_of():
    """(x, each client's update as a row)"""
    generator = np.random.default_rng(3)
    u = generator.normal(size=(9, 17)) + 0.7
    u[-2:] *= 20
    return generator.normal(size=17), u


def made(name, x, u, aggregate=BY_EXAMPLES, own=None, **options):
    updates = [Update(state(x + row), {}, int(w)) for row, w in zip(u, WEIGHTS, strict=False)]
    buffers = [{"b": torch.tensor([float(i)])} for i in range(len(u))]
    trusted = None if own is None else state(x + own)
    mean, *_ = robust_mean(
        DEFENCES[name](**options), Blocks(), state(x), updates, buffers, aggregate, trusted
    )
    return vector(mean.y) - x


def krum_order(u, f):
    distances = ((u[:, None] - u[None]) ** 2).sum(-1)
    np.fill_diagonal(distances, np.inf)
    return np.argsort(np.sort(distances, 1)[:, : len(u) - f - 2].sum(1), kind="stable")


def test_mean(round_of):
    x, u = round_of
    np.testing.assert_allclose(made("mean", x, u), WEIGHTS @ u / WEIGHTS.sum(), rtol=1e-10)
    np.testing.assert_allclose(made("mean", x, u, UNIFORM), u.mean(0), rtol=1e-10)


@pytest.mark.parametrize("n", [8, 9])
def test_median(round_of, n):
    x, u = round_of
    np.testing.assert_allclose(made("median", x, u[:n]), np.median(u[:n], 0), atol=1e-12)


def test_trimmed_mean(round_of):
    x, u = round_of
    expected = np.sort(u, 0)[2:7].mean(0)  # floor(0.3 * 9) at each end
    np.testing.assert_allclose(made("trimmed-mean", x, u), expected, atol=1e-12)


def test_krum(round_of):
    x, u = round_of
    np.testing.assert_allclose(made("krum", x, u), u[krum_order(u, 2)[0]], atol=1e-9)


def test_multi_krum(round_of):
    x, u = round_of
    kept = krum_order(u, 2)[:7]
    np.testing.assert_allclose(
        made("multi-krum", x, u), WEIGHTS[kept] @ u[kept] / WEIGHTS[kept].sum(), atol=1e-9
    )


def test_rfa(round_of):
    """The geometric median by plain Weiszfeld steps on vectors; it has the smallest sum of distances."""
    x, u = round_of
    v = WEIGHTS @ u / WEIGHTS.sum()
    for _ in range(2000):
        beta = WEIGHTS / np.linalg.norm(u - v, axis=1)
        v = beta @ u / beta.sum()
    np.testing.assert_allclose(made("rfa", x, u, steps=2000), v, atol=1e-6)


@pytest.mark.parametrize("tau", [None, 3.0])
def test_centred_clip(round_of, tau):
    x, u = round_of
    w, v = WEIGHTS / WEIGHTS.sum(), np.zeros(17)
    for _ in range(4):
        d = np.linalg.norm(u - v, axis=1)
        bound = np.median(d) if tau is None else tau
        v = v + (w * np.minimum(1, bound / d)) @ (u - v)
    np.testing.assert_allclose(made("centred-clip", x, u, tau=tau, steps=4), v, atol=1e-9)


@pytest.mark.parametrize("bound", [None, 1.5])
def test_norm_clip(round_of, bound):
    x, u = round_of
    d = np.linalg.norm(u, axis=1)
    tau = np.median(d) if bound is None else bound
    expected = (WEIGHTS / WEIGHTS.sum() * np.minimum(1, tau / d)) @ u
    np.testing.assert_allclose(made("norm-clip", x, u, bound=bound), expected, atol=1e-10)


def test_fltrust(round_of):
    x, u = round_of
    u = u.copy()
    u[0] *= -1
    own = u[3:7].mean(0)
    d, length = np.linalg.norm(u, axis=1), np.linalg.norm(own)
    trust = np.maximum(0, u @ own / d / length)
    expected = (trust / trust.sum() * length / d) @ u
    np.testing.assert_allclose(made("fltrust", x, u, own=own), expected, atol=1e-10)
    assert trust[0] == 0


def test_fltrust_trusts_nobody(round_of):
    x, u = round_of
    own = -u.sum(0)
    pointing = u[(u @ own) < 0]
    np.testing.assert_array_equal(made("fltrust", x, pointing, own=own), 0)


def cosines(u):
    units = u / np.linalg.norm(u, axis=1, keepdims=True)
    return units @ units.T


def clipped(u):
    d = np.linalg.norm(u, axis=1)
    return u * np.minimum(1, np.median(d) / d)[:, None]


def lower_median(values):
    return np.sort(values)[(len(values) - 1) // 2]


def aside_and_agreement(u):
    """((1 - m)^4, a)"""
    c, n = cosines(u), len(u)
    m = np.array([lower_median(np.delete(row, i)) for i, row in enumerate(c)])
    return (1 - m) ** 4, np.clip(lower_median(c[~np.eye(n, dtype=bool)]) / 0.25, 0, 1)


def company(u):
    """3 max(0, k - 0.3)"""
    c = cosines(u - np.median(u, 0))
    np.fill_diagonal(c, -1)
    return 3 * np.maximum(0, c.max(1) - 0.3)


def geometry_of(u, past=None):
    r = torch.from_numpy(u - np.median(u, 0))
    uniform = torch.full((len(u),), 1 / len(u), dtype=torch.float64)
    return Geometry(torch.from_numpy(u @ u.T), uniform, past=past, residual=r @ r.T)


def test_auto(round_of):
    x, u = round_of
    u = u.copy()
    u[0] *= -0.3  # short, and against the others
    v = WEIGHTS @ clipped(u)
    for _ in range(500):
        beta = WEIGHTS / np.linalg.norm(clipped(u) - v, axis=1)
        v = beta @ clipped(u) / beta.sum()
    aside, a = aside_and_agreement(u)
    standing = a * np.maximum(0, np.log(aside / np.median(aside)) - 1) + company(u)
    doubt = np.where(clipped(u) @ v >= 0, standing, np.inf)
    first = doubt <= max(0.3, lower_median(doubt))
    assert not first[0]
    rest, w = u[first], WEIGHTS[first]
    aside, a = aside_and_agreement(rest)
    s = np.linalg.norm(rest, axis=1) * aside
    kept = s <= (1.3 - 0.15 * a) * np.median(s)
    assert 2 < kept.sum() < len(rest)
    expected = w[kept] @ clipped(u)[first][kept] / w[kept].sum()
    np.testing.assert_allclose(made("auto", x, u), expected, atol=1e-9)


def test_flame_keeps_the_majority_of_directions():
    generator = np.random.default_rng(0)
    along, across = np.eye(17)[:2]
    u = np.concatenate(
        [along + 0.05 * generator.normal(size=(6, 17)), 3 * (across + 0.05 * generator.normal(size=(3, 17)))]
    )
    expected = WEIGHTS[:6] @ clipped(u)[:6] / WEIGHTS[:6].sum()
    np.testing.assert_allclose(made("flame", np.zeros(17), u), expected, atol=1e-10)


def test_auto_remembers_an_outlier():
    """standing = 0.9 standing + a max(0, 4 log((1 - m) / median(1 - m)) - 1) + company: it stays out for a while."""
    u = np.random.default_rng(0).normal(size=(7, 17)) + 1
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    honest = geometry_of(u)
    one = int(clustering.suspicion(honest).argmin())
    assert clustering.auto(honest)[one] > 0
    by = np.ones(7)
    by[one] = -1
    turned = u * by[:, None]
    past = clustering.standing(geometry_of(turned))
    c = cosines(turned)
    aside = 1 - np.array([np.sort(np.delete(row, i))[2] for i, row in enumerate(c)])  # the lower median of 6
    a = np.clip(np.sort(c[~np.eye(7, dtype=bool)])[20] / 0.25, 0, 1)
    expected = a * np.maximum(0, 4 * np.log(aside / np.median(aside)) - 1) + company(turned)
    np.testing.assert_allclose(past, expected)
    assert past[one] > 0.3
    again = replace(honest, past=past)
    assert clustering.auto(again)[one] == 0
    np.testing.assert_allclose(clustering.standing(again)[one], 0.9 * expected[one] + company(u)[one])


def test_auto_remembers_clients_that_were_alike():
    """Three of ten updates share a part that the others do not have. One of them then sends a harmless update."""
    generator = np.random.default_rng(0)
    common, shared = generator.normal(size=(2, 200))
    honest = generator.normal(size=(10, 200)) + common
    alike = np.concatenate([honest[:3] + shared, honest[3:]])
    together = geometry_of(alike)
    past = clustering.standing(together)
    np.testing.assert_allclose(past, company(alike), atol=1e-12)
    assert (past[:3] > 0.3).all()
    assert (past[3:] == 0).all()
    assert (clustering.auto(together)[:3] == 0).all()
    u = generator.normal(size=(10, 200)) + common
    u[0] *= 0.8
    later = geometry_of(u)
    assert clustering.standing(later)[0] == 0
    assert clustering.auto(later)[0] > 0
    assert clustering.auto(replace(later, past=past))[0] == 0


def test_auto_keeps_half_of_the_clients_when_more_are_in_doubt():
    honest = geometry_of(np.random.default_rng(0).normal(size=(9, 200)) + 1)
    past = torch.arange(1.0, 10.0, dtype=torch.float64)
    kept = clustering.auto(replace(honest, past=past)) != 0
    assert kept.any()
    assert not kept[5:].any()
