"""Partitions of N examples over clients: pure functions of the labels and a seed.

    iid               shuffled, equal parts
    dirichlet         p_k ~ Dir(alpha) over the clients, for every class k
    dirichlet_capped  the same as FedML draws it: a client that holds N / clients examples gets no more classes
    shards            McMahan et al. 2017: every client gets two shards, each of one class
    by_owner          one client per writer or role

Every partition assigns each example to exactly one client and leaves no client empty.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedpara.errors import ConfigError

DRAWS = 1_000  # attempts of `dirichlet_capped`
Ints = NDArray[np.int64]
Vector = Tensor | Ints | Sequence[int]


@dataclass(frozen=True, eq=False)
class Partition(Sequence[Ints]):
    """Each client's indices, stored as one flat array and its offsets: a million clients need two arrays.

    Client i holds `indices[offsets[i] : offsets[i + 1]]`. The arrays are read-only.
    """

    indices: Ints
    offsets: Ints

    def __post_init__(self) -> None:
        for name in ("indices", "offsets"):
            array = np.array(getattr(self, name), dtype=np.int64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def of(cls, clients: Iterable[Ints | Sequence[int]]) -> "Partition":
        rows = [np.asarray(row, dtype=np.int64) for row in clients]
        return cls(np.concatenate([np.empty(0, np.int64), *rows]), _offsets([len(row) for row in rows]))

    @property
    def sizes(self) -> Ints:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, i: int) -> Ints: ...
    @overload
    def __getitem__(self, i: slice) -> "Partition": ...
    def __getitem__(self, i: int | slice) -> "Ints | Partition":
        if isinstance(i, slice):
            return Partition.of(self[j] for j in range(*i.indices(len(self))))
        if not -len(self) <= i < len(self):
            raise IndexError(f"client {i} of {len(self)}")
        i %= len(self)
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        return np.array_equal(self.indices, other.indices) and np.array_equal(self.offsets, other.offsets)

    def __hash__(self) -> int:
        return hash((self.indices.tobytes(), self.offsets.tobytes()))

    def __repr__(self) -> str:
        return f"Partition({len(self)} clients, {len(self.indices)} indices)"


def iid(n_or_labels: int | Vector, clients: int, seed: int) -> Partition:
    """A shuffle cut into parts whose sizes differ by at most one."""
    n = n_or_labels if isinstance(n_or_labels, int) else len(_vector(n_or_labels))
    _check(clients, n)
    sizes = np.full(clients, n // clients)
    sizes[: n % clients] += 1
    return Partition(np.random.default_rng(seed).permutation(n), _offsets(sizes))


def dirichlet(labels: Vector, clients: int, alpha: float, seed: int) -> Partition:
    """p_k ~ Dir(alpha, ..., alpha) for every class k; client i gets the share p_ki of the class.

    A small alpha leaves many clients empty. Each of those gets one example of the largest client, so one draw is enough
    for every alpha.
    """
    y = _vector(labels)
    _check(clients, len(y), alpha)
    rng = np.random.default_rng(seed)
    owner = np.empty(len(y), np.int64)
    for members in _classes(y).values():
        counts = _cut(_shares(rng, alpha, clients), len(members))
        owner[rng.permutation(members)] = np.repeat(np.arange(clients), counts)
    _fill_empty(owner, clients, rng)
    return _deal(owner, clients)


def dirichlet_capped(labels: Vector, clients: int, alpha: float, seed: int, minimum: int = 10) -> Partition:
    """p_k ~ Dir(alpha, ..., alpha) class by class, as in FedML, which the paper cites for its non-IID split.

    p_ki is set to 0 for each client i that already holds N / clients examples, and the rest is normalised. All classes
    are drawn again until the smallest client has `minimum` examples. On CIFAR-10 with 100 clients and alpha 0.5, a
    client has 8.1 classes on average; with `dirichlet` it has 9.3.
    """
    y = _vector(labels)
    _check(clients, len(y), alpha)
    rng = np.random.default_rng(seed)
    groups = list(_classes(y).values())
    for _ in range(DRAWS):
        counts = _capped_counts(rng, [len(group) for group in groups], clients, alpha)
        if counts.sum(0).min() >= minimum:
            break
    else:
        raise ConfigError(
            f"{DRAWS:,} draws at alpha = {alpha} never gave each of {clients} clients {minimum} examples: "
            "use fewer clients, a larger alpha, a smaller minimum, or `dirichlet`."
        )
    owner = np.empty(len(y), np.int64)
    for group, row in zip(groups, counts, strict=True):
        owner[rng.permutation(group)] = np.repeat(np.arange(clients), row)
    return _deal(owner, clients)


def shards(labels: Vector, clients: int, seed: int, classes_per_client: int = 2) -> Partition:
    """clients x classes_per_client shards, each of one class, dealt at random (McMahan et al. 2017).

    Equal cuts of the sorted labels, as that paper describes them, can put two classes into one shard. Here each class
    gets shards in proportion to its examples, so a client never has more than `classes_per_client` classes.
    """
    y = _vector(labels)
    _check(clients, len(y))
    groups = list(_classes(y).values())
    total = clients * classes_per_client
    if not len(groups) <= total <= len(y):
        raise ConfigError(
            f"{clients} clients x {classes_per_client} classes make {total} shards: expected at least "
            f"{len(groups)}, one per class, and at most {len(y)}, one per example."
        )
    rng = np.random.default_rng(seed)
    counts = _apportion(np.array([len(group) for group in groups]), total)
    pieces: list[Ints] = []
    for group, count in zip(groups, counts, strict=True):
        pieces += np.array_split(rng.permutation(group), count)
    hands = rng.permutation(total).reshape(clients, classes_per_client)
    return Partition.of(np.concatenate([pieces[piece] for piece in hand]) for hand in hands)


def by_owner(owners: Vector, roster: Vector | None = None) -> Partition:
    """One client per owner, in ascending order.

    Pass the training set's owners as `roster` to partition a test set over the same clients. An owner in the roster
    without test examples gets an empty client; examples of other owners are left out.
    """
    owned = _vector(owners)
    names = np.unique(owned if roster is None else _vector(roster))
    client = np.minimum(np.searchsorted(names, owned), len(names) - 1)
    return _deal(client, len(names), np.flatnonzero(names[client] == owned))


def split(
    clients: Sequence[Ints | Sequence[int]],
    labels: Vector,
    fraction: float,
    seed: int | tuple[int, int],
    exact: bool = False,
) -> tuple[Partition, Partition]:
    """(train, test) of every client: `fraction` of each of its classes goes to test.

    `clients` is a Partition, or a sequence with the example indices of each client.

    A class with m >= 2 examples gives between 1 and m - 1 of them, so that a client's test data has the client's
    classes. A class with one example stays in train. With small classes the test share is larger than `fraction`. With
    `exact`, a client with n >= 2 examples gives round(fraction n) of them, between 1 and n - 1, in proportion to its
    classes; a client with one example gives none.

    To choose hyper-parameters without the test set, score the held-out examples instead, as `--validation 0.1` does:

        kept, held = data.split(clients, train.targets, 0.1, seed=0, exact=True)
        fp.simulate(fp.Task(model, test=train.subset(held.indices)), fp.FederatedData(train, kept), ...)

    `fp.FederatedData(train, kept, test_clients=held)` scores each client's model on that client's part.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"fraction = {fraction}: expected a test share between 0 and 1, such as 0.1.")
    partition = clients if isinstance(clients, Partition) else Partition.of(clients)
    held = partition.indices
    client = np.repeat(np.arange(len(partition)), partition.sizes)
    y = _vector(labels)[held]
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(held)), y, client))
    first = np.ones(len(held), dtype=bool)
    first[1:] = np.diff(client[order]) != 0
    if not exact:
        first[1:] |= np.diff(y[order]) != 0
    start = np.flatnonzero(first)
    size = np.diff(start, append=len(held))
    take = np.clip(np.rint(size * fraction).astype(np.int64), 1, np.maximum(size - 1, 1)) * (size > 1)
    rank = np.arange(len(held)) - np.repeat(start, size)
    count, many = np.repeat(take, size), np.repeat(size, size)
    test = np.empty(len(held), dtype=bool)
    if exact:  # every (size / take)th example in the order of their classes, from a random start
        at = rank * count + np.repeat(rng.integers(size), size)
        test[order] = (at + count) // many > at // many
    else:
        test[order] = rank < count

    def part(chosen: NDArray[np.bool_]) -> Partition:
        return Partition(held[chosen], _offsets(np.bincount(client[chosen], minlength=len(partition))))

    return part(~test), part(test)


def personal_test(
    test_labels: Vector, partition: Partition, train_labels: Vector, seed: int = 0, limit: int | None = None
) -> Partition:
    """For each client, all test examples of the classes that the client has in training.

    `limit` draws at most that many per client, with `seed`: in a large federation the clients' test data would
    otherwise repeat most of the test set for every client.
    """
    tests = _classes(_vector(test_labels))
    y = _vector(train_labels)
    rng = np.random.default_rng(seed)
    nothing = np.empty(0, np.int64)

    def drawn(client: Ints) -> Ints:
        own = np.concatenate([nothing, *(tests.get(k, nothing) for k in np.unique(y[client]).tolist())])
        return np.sort(own if limit is None or len(own) <= limit else rng.choice(own, limit, replace=False))

    return Partition.of(drawn(client) for client in partition)


def _vector(values: Vector) -> Ints:
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ConfigError(f"labels are {array.dtype} {list(array.shape)}: expected a row of integers.")
    return array.astype(np.int64, copy=False)


def _check(clients: int, examples: int, alpha: float = 1.0) -> None:
    if not 1 <= clients <= examples:
        raise ConfigError(f"{clients} clients for {examples} examples: expected 1 to {examples} clients.")
    if not alpha > 0:
        raise ConfigError(f"alpha = {alpha}: expected a number above 0, such as 0.5.")


def _shares(rng: np.random.Generator, alpha: float, clients: int) -> NDArray[np.float64]:
    """One draw of Dir(alpha, ..., alpha). Above 1e12, where the shares are equal, NumPy's draws would overflow."""
    return rng.dirichlet(np.full(clients, min(alpha, 1e12)))


def _cut(p: NDArray[np.float64], count: int) -> Ints:
    """How many of `count` examples each share of p gets, cut at the cumulative sum."""
    edges = np.rint(np.cumsum(p)[:-1] * count).astype(np.int64)
    return np.diff(np.minimum(edges, count), prepend=0, append=count)


def _capped_counts(rng: np.random.Generator, sizes: Sequence[int], clients: int, alpha: float) -> Ints:
    """[classes, clients]: how many of each class a client gets. All zero if the draw gives a class to nobody."""
    counts = np.zeros((len(sizes), clients), np.int64)
    cap = sum(sizes) / clients
    for k, size in enumerate(sizes):
        p = _shares(rng, alpha, clients) * (counts.sum(0) < cap)
        if not p.sum() > 0:  # at a tiny alpha the open clients' shares may all be 0
            return np.zeros_like(counts)
        counts[k] = _cut(p / p.sum(), size)
    return counts


def _offsets(sizes: Sequence[int] | Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _classes(y: Ints) -> dict[int, Ints]:
    """The indices of each class that occurs, ascending."""
    order = np.argsort(y, kind="stable")
    present, start = np.unique(y[order], return_index=True)
    return dict(zip(present.tolist(), np.split(order, start[1:]), strict=False))


def _deal(owner: Ints, clients: int, among: Ints | None = None) -> Partition:
    """The partition in which client `owner[j]` holds example j, for all j or only those in `among`."""
    chosen = np.arange(len(owner)) if among is None else among
    held = owner[chosen]
    order = np.argsort(held, kind="stable")
    return Partition(chosen[order], _offsets(np.bincount(held, minlength=clients)))


def _fill_empty(owner: Ints, clients: int, rng: np.random.Generator) -> None:
    """Move one example from the largest client to each empty one, in place."""
    sizes = np.bincount(owner, minlength=clients)
    empty = np.flatnonzero(sizes == 0)
    if not len(empty):
        return
    shuffled = rng.permutation(len(owner))
    held = _deal(owner[shuffled], clients)
    largest = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    for client in empty.tolist():
        size, donor = largest[0]
        owner[shuffled[held[donor][-size - 1]]] = client
        heapq.heapreplace(largest, (size + 1, donor))


def _apportion(counts: Ints, total: int) -> Ints:
    """Divide `total` in proportion to `counts`: each part is at least 1 and at most its count."""
    seats: Ints = np.maximum(1, counts * total // counts.sum())
    while (missing := total - int(seats.sum())) != 0:
        load = counts / seats
        if missing > 0:
            seats[np.argmax(np.where(seats < counts, load, -np.inf))] += 1
        else:
            seats[np.argmin(np.where(seats > 1, load, np.inf))] -= 1
    return seats
