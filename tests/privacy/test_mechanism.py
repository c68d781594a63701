"""Golden: clipping, noise and adaptive clipping against NumPy."""

from hashlib import shake_256

import numpy as np
import pytest
import torch

from fedpara import algorithms
from fedpara.privacy import User
from fedpara.privacy.clipping import clip_update, noise_of_updates
from fedpara.privacy.randomness import BLOCK, Noise, fresh_key

CHANGES = np.array([[0.3, 0.0, 0.4], [3.0, 4.0, 0.0], [0.0, 0.0, -0.1], [-6.0, 0.0, 8.0]])


def gaussians(seed, round, *counts):
    """The numbers of a seeded round, written a second time."""
    for block, count in enumerate(counts):
        pairs = (count + 1) // 2
        raw = shake_256(f"seed {seed} {round}|".encode() + block.to_bytes(8, "little")).digest(16 * pairs)
        bits = [int.from_bytes(raw[i : i + 8], "little") >> 11 for i in range(0, len(raw), 8)]
        u = (np.array(bits[:pairs], float) + 1) / 2**53
        v = np.array(bits[pairs:], float) / 2**53
        z = np.sqrt(-2 * np.log(u)) * np.exp(2j * np.pi * v)
        yield np.concatenate([z.real, z.imag])[:count]


def clipped(changes, bound):
    norms = np.linalg.norm(changes, axis=1, keepdims=True)
    return changes * np.minimum(1, bound / norms)


def test_a_round_adds_noise_to_the_sum_of_clipped_updates(rounds):
    (noise,) = gaussians(7, 1, 3)
    expected = (clipped(CHANGES, 0.5).sum(0) + 1.5 * 0.5 * noise) / 5
    made = rounds(User(1.5, 0.5), seed=7).play(CHANGES)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-7)


def test_the_bound_follows_the_quantile(rounds):
    kind = User(1.0, 0.2, quantile=0.6, clip_rate=0.5, bit_noise=3.0)
    play, bound = rounds(kind, seed=1), 0.2
    z = 1 / np.sqrt(1 / 1.0**2 - 1 / (2 * 3.0) ** 2)
    for t in range(1, 6):
        noise, (bit,) = gaussians(1, t, 3, 1)
        expected = (clipped(CHANGES, bound).sum(0) + z * bound * noise) / 5
        np.testing.assert_allclose(play.play(CHANGES), expected, rtol=1e-5, atol=1e-6)
        below = np.linalg.norm(CHANGES, axis=1) < bound
        share = ((below - 0.5).sum() + 3.0 * bit) / 5 + 0.5
        bound *= np.exp(-0.5 * (share - 0.6))
        assert play.server["privacy"]["clip"] == pytest.approx(bound, rel=1e-5)


def test_adaptive_clipping_finds_the_quantile(rounds):
    """Norms 1 to 20, and nearly no noise: half of them are below the bound after a while."""
    changes = np.eye(1, 3) * np.arange(1, 21)[:, None]
    play = rounds(User(0.1, 0.1, quantile=0.5, bit_noise=0.1), clients=20, cohort=20, seed=0)
    for _ in range(80):
        play.play(changes)
    assert 9.5 < play.server["privacy"]["clip"] < 11.5


def test_bits_and_updates_together_cost_as_much_as_the_noise_alone():
    """Two Gaussian releases of sensitivity 1 and 1/2 are one of mu^2 = z_d^-2 + (2 s)^-2."""
    z = noise_of_updates(1.1, 0.9)
    assert z**-2 + (0.5 / 0.9) ** 2 == pytest.approx(1.1**-2)
    assert z > 1.1


def test_clipping_keeps_short_updates_and_the_direction():
    d = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    same, norm = clip_update(d, 5.0)
    assert norm == 5.0
    assert same is d
    short, _ = clip_update(d, 1.0)
    torch.testing.assert_close(short, {"a": torch.tensor([0.6, 0.0]), "b": torch.tensor([[0.8]])})


def test_an_empty_round_gets_the_same_noise(rounds):
    """A model that stays unchanged would tell that nobody took part."""
    (noise,) = gaussians(7, 1, 3)
    np.testing.assert_allclose(rounds(User(1.5, 0.5), seed=7).play([]), 1.5 * 0.5 * noise / 5, rtol=1e-5)


def test_a_server_optimizer_steps_from_the_noisy_mean(rounds):
    """FedAdam's step is post-processing: with the same seed it sees the mean that FedAvg takes."""
    mean = rounds(User(1.0, 0.5), seed=2).play(CHANGES)
    adam = rounds(User(1.0, 0.5), seed=2, algorithm=algorithms.fedadam()).play(CHANGES)
    assert np.array_equal(np.sign(adam), np.sign(mean))
    assert not np.allclose(adam, mean)


def test_noise_is_gaussian_and_fresh():
    drawn = Noise(fresh_key()).draw(200_000)
    assert abs(drawn.mean()) < 5 / np.sqrt(200_000)
    assert abs(drawn.var() - 1) < 5 * np.sqrt(2 / 200_000)
    edges = np.array([-1.959964, -0.6744898, 0.0, 0.6744898, 1.959964])
    below = (drawn[:, None] < edges).mean(0)
    np.testing.assert_allclose(below, [0.025, 0.25, 0.5, 0.75, 0.975], atol=0.006)
    assert abs(np.corrcoef(drawn[:100_000], drawn[100_000:])[0, 1]) < 0.02
    assert not np.array_equal(Noise(fresh_key()).draw(8), Noise(fresh_key()).draw(8))


def test_blocks_do_not_repeat():
    key = fresh_key()
    drawn = Noise(key).draw(BLOCK + 5)
    assert len(np.unique(drawn)) == BLOCK + 5
    assert np.array_equal(drawn, Noise(key).draw(BLOCK + 5))
