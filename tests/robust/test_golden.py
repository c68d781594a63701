"""Golden: every defence against a NumPy computation on whole vectors, without Gram matrices."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedpara.algorithms import FromMean, Update
from fedpara.robust import DEFENCES, Blocks, clustering, robust_mean
from fedpara.robust.geometry import Geometry

SHAPES = {"a": (40, 50), "b": (100,)}
A, D = 2000, 2100
ALTERNATING = np.where(np.arange(D) % 2, 1.0, -1.0)
WEIGHTS = np.array([4.0, 1.0, 2.0, 3.0, 2.0, 5.0, 1.0, 2.0, 3.0])
UNIFORM = FromMean(lambda x, server, mean, clients: (mean.y, server), weights="uniform")
BY_EXAMPLES = FromMean(lambda x, server, mean, clients: (mean.y, server))


def state(vector):
    split = np.split(vector, [A])
    return {
        name: torch.from_numpy(part.reshape(SHAPES[name])) for name, part in zip(SHAPES, split, strict=True)
    }


def vector(state):
    return np.concatenate([tensor.numpy().ravel() for tensor in state.values()])


@pytest.fixture
def round_of():
    """(x, each client's update as a row)"""
    generator = np.random.default_rng(3)
    u = generator.normal(size=(9, D)) + 0.7
    u[-2:] *= 20
    return generator.normal(size=D), u


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
    w, v = WEIGHTS / WEIGHTS.sum(), np.zeros(D)
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


def stands_aside(u):
    """a s > 1.15 median(s),   s = ||u|| (1 - m)^4"""
    c, n = cosines(u), len(u)
    m = np.array([lower_median(np.delete(row, i)) for i, row in enumerate(c)])
    s = np.linalg.norm(u, axis=1) * (1 - m) ** 4
    a = np.clip(lower_median(c[~np.eye(n, dtype=bool)]) / 0.25, 0, 1)
    return a * s > 1.15 * np.median(s)


def residuals(u, past):
    """r = v - the median of v over clients in good standing, v = u clipped to their median norm"""
    d, good = np.linalg.norm(u, axis=1), past <= max(0.5, lower_median(past))
    v = u * np.minimum(1, np.median(d[good]) / d)[:, None]
    return v - np.median(v[good], 0)


def z_scores(c, least):
    """(c - median(c)) / max(the shortest interval with a third of c / that of a standard normal, least)"""
    ordered, third = np.sort(c), int(np.ceil(len(c) / 3))
    shortest = min(ordered[i + third] - ordered[i] for i in range(len(c) - third))
    return (c - np.median(c)) / max(shortest / 0.8615, least)


def standing(u, past):
    """past / 2 + max(0, k - 4.5), k_i = max_j z(max_l z(c_lij))"""
    r, n = residuals(u, past), len(u)
    pairs = np.triu_indices(n, 1)
    layers = [r[:, :A], r[:, A:]]
    z = [z_scores(cosines(layer)[pairs], layer.shape[1] ** -0.5) for layer in layers]
    k = np.full((n, n), -np.inf)
    k[pairs] = z_scores(np.max(z, 0), 0.5)
    return past / 2 + np.maximum(0, np.maximum(k, k.T).max(1) - 4.5)


def linked(u):
    """The largest group of directions: single linkage, cut at the largest gap among groups of more than half."""
    distance, groups = 1 - cosines(u), [{i} for i in range(len(u))]
    found = []
    while len(groups) > 1:
        pairs = [
            (distance[np.ix_(list(a), list(b))].min(), a, b) for a in groups for b in groups if a is not b
        ]
        at, a, b = min(pairs, key=lambda pair: pair[0])
        groups = [group for group in groups if group is not a and group is not b] + [a | b]
        if len(a | b) > len(u) / 2:
            found.append((at, a | b))
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(found)]
    return found[int(np.argmax(gaps)) if gaps else 0][1]


def judged(u, past):
    """(auto's c by equal weights, the standings after the round)"""
    n = len(u)
    updates = [Update(state(row), {}, 1) for row in u]
    geometries = []

    def weigh(g):
        geometries.append(g)
        return clustering.auto(g)

    defence = replace(DEFENCES["auto"](), weigh=weigh)
    x = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    *_, after = robust_mean(
        defence, Blocks(), x, updates, [{}] * n, UNIFORM, past=torch.from_numpy(past.copy())
    )
    return clustering.auto(geometries[0]).numpy(), after.numpy()


def test_auto():
    """Over 20 rounds, each of the three tests drops somebody whom the others keep."""
    dropped = np.zeros(3, int)
    for seed in range(20):
        generator = np.random.default_rng(seed)
        u = 0.8 * generator.normal(size=(9, D)) + 1
        u[0] *= -0.002
        u[1:3] = 1 + 0.5 * generator.normal(size=(2, D)) + 0.7 * ALTERNATING
        u[3] *= 3
        past = generator.choice([0.0, 0.2, 1.0], size=9)
        after = standing(u, past)
        group = np.isin(np.arange(9), list(linked(u)))
        tests = [group, after <= max(0.5, lower_median(after)), ~stands_aside(u)]
        dropped += [(np.sum(tests, 0) == 2)[~test].sum() for test in tests]
        kept = np.all(tests, 0) if np.all(tests, 0).any() else tests[0] & tests[1]
        d = np.linalg.norm(u, axis=1)
        c, found = judged(u, past)
        np.testing.assert_allclose(found, after, atol=1e-12)
        np.testing.assert_allclose(c, kept / kept.sum() * np.minimum(1, np.median(d) / d), atol=1e-12)
    assert (dropped > 0).all()


def test_flame_keeps_the_majority_of_directions():
    generator = np.random.default_rng(0)
    along, across = np.eye(D)[:2]
    u = np.concatenate(
        [along + 0.05 * generator.normal(size=(6, D)), 3 * (across + 0.05 * generator.normal(size=(3, D)))]
    )
    expected = WEIGHTS[:6] @ clipped(u)[:6] / WEIGHTS[:6].sum()
    np.testing.assert_allclose(made("flame", np.zeros(D), u), expected, atol=1e-10)


def alike_and_later(generator):
    """(ten updates of which three share a part, ten that share nothing)"""
    first, later = generator.normal(size=(2, 10, D)) + 2
    first[:3] += 1.5 * ALTERNATING
    return first, later


def test_auto_remembers_clients_that_were_alike():
    """They stay out of the next round, in which they share nothing, and are back after a while."""
    first, later = alike_and_later(np.random.default_rng(0))
    c, after = judged(first, np.zeros(10))
    assert (c[:3] == 0).all()
    assert (after[:3] > 0.4).all()
    fresh, _ = judged(later, np.zeros(10))
    one = int(np.argmax(fresh[:3]))
    assert fresh[one] > 0
    again, _ = judged(later, after)
    assert again[one] == 0
    forgotten, _ = judged(later, after / 2**5)
    assert forgotten[one] > 0


def test_long_updates_of_clients_in_bad_standing_do_not_pull_the_median():
    """Four of ten are long and alike. Without a memory, short honest updates look alike too: less of the same part."""
    generator = np.random.default_rng(1)
    u = generator.normal(size=(10, D))
    u[:4] += 3 * ALTERNATING
    u[4:7] += 0.3 * ALTERNATING
    past = np.zeros(10)
    past[:4] = 1.0
    _, known = judged(u, past)
    _, unknown = judged(u, np.zeros(10))
    assert (known[:4] > 0.9).all()
    assert known[4:].sum() < unknown[4:].sum()
    c, _ = judged(u, past)
    assert (c[:4] == 0).all()
    assert c[4:].sum() > 0


def test_auto_keeps_half_of_the_clients_when_more_are_in_doubt():
    u = np.random.default_rng(0).normal(size=(9, D)) + 1
    c, _ = judged(u, np.arange(1.0, 10.0))
    assert (c != 0).any()
    assert not (c[5:] != 0).any()


def company_of(*layers):
    """k of clients whose residuals are these layers [n, d]"""
    grams = torch.stack([torch.from_numpy(layer @ layer.T) for layer in layers])
    sizes = torch.tensor([float(layer.shape[1]) for layer in layers])
    n = len(layers[0])
    g = Geometry(torch.eye(n, dtype=torch.float64), torch.full((n,), 1 / n), residual=(grams, sizes))
    return clustering.company(g).numpy()


@pytest.mark.parametrize("n", [3, 5, 10, 30])
def test_layers_of_one_number_tell_nothing(n):
    """Their cosines are 1 or -1: every client resembles half of the others completely."""
    generator = np.random.default_rng(n)
    for _ in range(50):
        k = company_of(*generator.normal(size=(3, n, 1)))
        assert (k <= clustering.USUAL).all()


def test_one_layer_in_common_is_enough():
    """Two of ten clients share a part of one of twenty layers. The scale of that layer does not matter."""
    for seed in range(5):
        generator = np.random.default_rng(seed)
        layers = list(generator.normal(size=(20, 10, 300)))
        assert (company_of(*layers) < clustering.USUAL + clustering.TOLERATED).all()
        layers[3][:2] += ALTERNATING[:300]
        layers[3] *= 1e-3
        k = company_of(*layers)
        assert (k[:2] > clustering.USUAL + clustering.TOLERATED).all()
        assert (k[2:] < clustering.USUAL + clustering.TOLERATED).all()
