"""Properties of every partition: each example once, no empty client, seeded."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedpara.data import (
    Partition,
    by_owner,
    dirichlet,
    dirichlet_capped,
    iid,
    personal_test,
    shards,
    split,
)
from fedpara.errors import ConfigError

seeds = st.integers(0, 2**32 - 1)
labels_of = st.lists(st.integers(0, 5), min_size=1, max_size=120)


@st.composite
def labelled(draw):
    labels = np.array(draw(labels_of))
    return labels, draw(st.integers(1, len(labels)))


def dealt_once(partition, count):
    return sorted(np.concatenate(list(partition)).tolist()) == list(range(count))


@settings(deadline=None)
@given(labelled(), seeds)
def test_iid_deals_once_in_equal_parts(case, seed):
    labels, clients = case
    partition = iid(labels, clients, seed)
    assert len(partition) == clients
    assert dealt_once(partition, len(labels))
    assert np.ptp(partition.sizes) <= 1
    assert partition == iid(len(labels), clients, seed)


@settings(deadline=None)
@given(labelled(), st.sampled_from([5e-324, 1e-6, 0.01, 0.5, 1.0, 100.0, 1e300]), seeds)
def test_dirichlet_deals_once_and_leaves_no_client_empty(case, alpha, seed):
    labels, clients = case
    partition = dirichlet(labels, clients, alpha, seed)
    assert len(partition) == clients
    assert dealt_once(partition, len(labels))
    assert partition.sizes.min() >= 1
    assert partition == dirichlet(torch.from_numpy(labels), clients, alpha, seed)


def test_dirichlet_alpha_goes_from_one_class_to_all_classes():
    labels = np.tile(np.arange(10), 5_000)

    def largest_share(alpha):
        partition = dirichlet(labels, 100, alpha, seed=3)
        counts = np.stack([np.bincount(labels[client], minlength=10) for client in partition])
        return float((counts.max(1) / counts.sum(1)).mean())

    few, paper, many = largest_share(0.01), largest_share(0.5), largest_share(1e6)
    assert few > 0.9
    assert 0.25 < paper < 0.6
    assert many < 0.12


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution():
    """Dir(alpha) over N clients: mean 1/N, variance (N - 1) / (N^2 (N alpha + 1))."""
    clients, alpha, per_class = 5, 0.7, 1_000
    labels = np.repeat(np.arange(400), per_class)
    partition = dirichlet(labels, clients, alpha, seed=11)
    shares = np.stack([np.bincount(labels[client], minlength=400) for client in partition]) / per_class
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    np.testing.assert_allclose(shares.mean(1), 1 / clients, atol=0.04)
    np.testing.assert_allclose(shares.var(1), variance, rtol=0.25)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=40, max_size=300),
    st.integers(1, 4),
    st.sampled_from([0.5, 1.0, 100.0, 1e300]),
    seeds,
)
def test_dirichlet_capped_deals_once_and_gives_every_client_its_minimum(labels, clients, alpha, seed):
    labels, minimum = np.array(labels), 3
    partition = dirichlet_capped(labels, clients, alpha, seed, minimum)
    assert len(partition) == clients
    assert dealt_once(partition, len(labels))
    assert partition.sizes.min() >= minimum
    assert partition == dirichlet_capped(torch.from_numpy(labels), clients, alpha, seed, minimum)


def test_a_full_client_gets_no_further_class():
    """The cap is checked before every class: without its last class, each client holds less than N / clients."""
    labels = np.repeat(np.arange(10), 500)
    for seed in range(5):
        for client in dirichlet_capped(labels, 20, 0.5, seed):
            held = labels[client]
            assert (held < held.max()).sum() < 5_000 / 20


def test_golden_dirichlet_on_cifar10_with_and_without_the_cap():
    """50,000 labels, 100 clients, alpha 0.5: 8.2 classes and at most about 1,010 examples per client with FedML's cap;
    without it, 9.3 classes and about 1,500 examples."""
    labels = np.tile(np.arange(10), 5_000)

    def figures(deal):
        drawn = [deal(labels, 100, 0.5, seed) for seed in range(5)]
        classes = [len(np.unique(labels[client])) for partition in drawn for client in partition]
        return np.mean(classes), np.mean([partition.sizes.max() for partition in drawn])

    (capped, largest), (plain, larger) = figures(dirichlet_capped), figures(dirichlet)
    assert capped == pytest.approx(8.2, abs=0.15)
    assert largest == pytest.approx(1_010, rel=0.1)
    assert plain == pytest.approx(9.3, abs=0.1)
    assert larger == pytest.approx(1_450, rel=0.1)


@settings(deadline=None)
@given(labelled(), st.integers(1, 3), seeds)
def test_shards_limit_the_classes_of_a_client(case, classes_per_client, seed):
    labels, clients = case
    total = clients * classes_per_client
    assume(len(np.unique(labels)) <= total <= len(labels))
    partition = shards(labels, clients, seed, classes_per_client)
    assert len(partition) == clients
    assert dealt_once(partition, len(labels))
    assert all(1 <= len(np.unique(labels[client])) <= classes_per_client for client in partition)
    assert partition == shards(labels, clients, seed, classes_per_client)


def test_shards_are_drawn_at_random():
    """Otherwise a client would get neighbours in the file, such as the examples of one writer."""
    shares = [shards(np.zeros(100, np.int64), 2, seed, classes_per_client=1)[0] for seed in range(2)]
    assert not np.array_equal(np.sort(shares[0]), np.sort(shares[1]))
    assert not any(set(share.tolist()) in (set(range(50)), set(range(50, 100))) for share in shares)


def test_shards_of_even_classes_are_even():
    partition = shards(np.tile(np.arange(10), 6_000), 100, seed=0)
    assert set(partition.sizes.tolist()) == {600}


@settings(deadline=None)
@given(
    st.lists(st.integers(-3, 9), min_size=1, max_size=60),
    st.lists(st.integers(-3, 9), min_size=1, max_size=60),
)
def test_by_owner_gives_train_and_test_the_same_clients(train, test):
    train, test = np.array(train), np.array(test)
    names = np.unique(train)
    partition = by_owner(train)
    assert dealt_once(partition, len(train))
    assert [set(train[client].tolist()) for client in partition] == [{name} for name in names.tolist()]
    aligned = by_owner(test, roster=train)
    assert len(aligned) == len(partition)
    for name, client in zip(names, aligned, strict=True):
        assert client.tolist() == np.flatnonzero(test == name).tolist()


@settings(deadline=None)
@given(labelled(), st.floats(0.01, 0.99), seeds)
def test_split_holds_out_some_of_every_class_the_client_can_spare(case, fraction, seed):
    labels, clients = case
    whole = dirichlet(labels, clients, 0.5, seed)
    train, test = split(whole, labels, fraction, seed)
    assert (train, test) == split(whole, labels, fraction, seed)
    for all_of, kept, held_out in zip(whole, train, test, strict=True):
        assert sorted([*kept.tolist(), *held_out.tolist()]) == sorted(all_of.tolist())
        for label in np.unique(labels[all_of]):
            size = int((labels[all_of] == label).sum())
            out = int((labels[held_out] == label).sum())
            assert out == 0 if size == 1 else 1 <= out <= size - 1
            assert abs(out - size * fraction) <= 1


@settings(deadline=None)
@given(labelled(), st.floats(0.01, 0.99), seeds)
def test_an_exact_split_holds_out_the_share_in_proportion_to_the_classes(case, fraction, seed):
    labels, clients = case
    whole = dirichlet(labels, clients, 0.5, seed)
    train, test = split(whole, labels, fraction, seed, exact=True)
    assert (train, test) == split(whole, labels, fraction, seed, exact=True)
    for all_of, kept, held_out in zip(whole, train, test, strict=True):
        n = len(all_of)
        assert sorted([*kept.tolist(), *held_out.tolist()]) == sorted(all_of.tolist())
        assert len(held_out) == (0 if n == 1 else min(max(round(fraction * n), 1), n - 1))
        for label in np.unique(labels[all_of]):
            share = (labels[all_of] == label).sum() * len(held_out) / n
            assert abs((labels[held_out] == label).sum() - share) < 1


@settings(deadline=None)
@given(labelled(), labels_of, seeds, st.none() | st.integers(1, 20))
def test_personal_test_has_exactly_the_clients_classes(case, tests, seed, limit):
    labels, clients = case
    tests = np.array(tests)
    partition = iid(labels, clients, seed)
    personal = personal_test(tests, partition, labels, seed, limit)
    assert len(personal) == clients
    for client, own in zip(partition, personal, strict=True):
        expected = np.flatnonzero(np.isin(tests, labels[client]))
        assert len(own) == min(len(expected), len(expected) if limit is None else limit)
        assert len(np.unique(own)) == len(own)
        assert set(own.tolist()) <= set(expected.tolist())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: iid(3, 4, 0), "4 clients for 3 examples"),
        (lambda: iid(3, 0, 0), "0 clients for 3 examples"),
        (lambda: dirichlet([0, 1], 3, 0.5, 0), "3 clients for 2 examples"),
        (lambda: dirichlet([0, 1], 2, 0.0, 0), "alpha = 0.0"),
        (lambda: dirichlet([0, 1], 2, -1.0, 0), "alpha = -1.0"),
        (lambda: dirichlet([0, 1], 2, float("nan"), 0), "alpha = nan"),
        (lambda: dirichlet_capped([0, 1] * 50, 2, 0.0, 0), "alpha = 0.0"),
        (lambda: dirichlet_capped([0] * 100, 10, 0.01, 0), "1,000 draws at alpha = 0.01 .*fewer clients"),
        (lambda: dirichlet_capped([0, 1] * 50, 11, 0.5, 0), "never gave each of 11 clients 10 examples"),
        (lambda: dirichlet([0.5, 1.5], 2, 0.5, 0), "expected a row of integers"),
        (lambda: dirichlet([[0, 1]], 1, 0.5, 0), "expected a row of integers"),
        (lambda: shards([0, 1, 2, 3, 4], 2, 0), "4 shards"),
        (lambda: shards([0, 0, 0], 2, 0), "4 shards"),
        (lambda: shards([0, 1, 2], 2, 0, classes_per_client=0), "0 shards"),
        (lambda: split(iid(4, 2, 0), [0, 1, 0, 1], 1.0, 0), "fraction = 1.0"),
        (lambda: split(iid(4, 2, 0), [0, 1, 0, 1], 0.0, 0), "fraction = 0.0"),
    ],
)
def test_errors_name_the_value(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8))
def test_a_partition_is_a_sequence_of_its_rows(rows):
    partition = Partition.of(rows)
    assert [client.tolist() for client in partition] == rows
    assert [partition[i - len(rows)].tolist() for i in range(len(rows))] == rows
    assert [client.tolist() for client in partition[1:5:2]] == rows[1:5:2]
    assert partition.sizes.tolist() == [len(row) for row in rows]
    assert hash(partition) == hash(Partition.of(rows))
    for outside in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            partition[outside]


def test_a_partition_is_read_only_and_copies_its_arguments():
    indices = np.array([2, 0, 1])
    partition = Partition(indices, np.array([0, 1, 3]))
    indices[0] = 7
    assert partition[0].tolist() == [2]
    with pytest.raises(ValueError, match="read-only"):
        partition[0][0] = 5


def test_a_million_clients_are_two_arrays():
    partition = iid(2_000_000, 1_000_000, seed=0)
    assert len(partition) == 1_000_000
    assert partition.indices.nbytes + partition.offsets.nbytes == 8 * (2_000_000 + 1_000_001)
    assert len(partition[999_999]) == 2
