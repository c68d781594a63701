"""FederatedData: which client holds which examples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpara.data.convert import Collate, as_examples
from fedpara.data.examples import Examples, Indices
from fedpara.data.partition import Partition
from fedpara.errors import ConfigError, DataError

Rows = NDArray[np.int64]


def of_classes(classes: int, ignored: int) -> str:
    """What a target may be, for messages."""
    return f"expected 0 to {classes - 1} for a model with {classes} outputs, or {ignored} for one that does not count."


@dataclass(frozen=True, eq=False)
class FederatedData:
    """`clients[i]` are the indices into `train` that client i trains on.

    `clients` may be lazy: only `len()` and `[i]` are used. For personal evaluation set `test_clients`, the indices into
    `train` that each client holds out (`data.split`), or `personal = (test, indices)`, each client's indices into
    another set (`data.personal_test`). `test` scores the global model if the Task has no test set.
    """

    train: Examples
    clients: Sequence[Indices]
    test_clients: Sequence[Indices] | None = None
    personal: tuple[Examples, Sequence[Indices]] | None = None
    test: Examples | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", as_examples(self.train))
        if self.test is not None:
            object.__setattr__(self, "test", as_examples(self.test))
        if self.test_clients is not None and self.personal is not None:
            raise ConfigError("test_clients and personal are both set: expected at most one of them.")
        tests = self.test_clients if self.personal is None else self.personal[1]
        if tests is not None and len(tests) != len(self.clients):
            raise ConfigError(f"test data for {len(tests)} clients: expected {len(self.clients)}.")

    @staticmethod
    def of(
        sources: Sequence[Any] | Callable[[int], Any],
        *,
        clients: int | None = None,
        test: Any = None,
        tests: Sequence[Any] | Callable[[int], Any] | None = None,
        collate: Collate | None = None,
        sizes: Sequence[int] | None = None,
        classes: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> "FederatedData":
        """The federation whose client i holds `sources[i]`, or `sources(i)` for a function and a number of `clients`.

        sources   of each client: (inputs, targets) as tensors, NumPy arrays or memory maps; a torch Dataset; a Hugging
                  Face data set; an Arrow table; Examples. What is not in memory is read whenever the client is in a
                  cohort, and then dropped: only one cohort is in memory at a time.
        test      one such source that scores the global model
        tests     one for each client, which scores the client's own model
        collate   list of items -> (inputs, targets), for items that must be padded; always to the same length
        sizes     how many examples each client holds, if `sources` is a function: otherwise a client is read to count
        """

        from fedpara.data.loaded import federation_of

        options = {"collate": collate, "classes": classes, "mean": mean, "std": std}
        return federation_of(sources, clients, test, tests, sizes, options)

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        own = ", each with test data" * self.has_personal
        return f"FederatedData({len(self):,} client{'s' * (len(self) != 1)}{own}\n    train: {self.train!r})"

    def size(self, i: int) -> int:
        return int(self.sizes[i]) if isinstance(self.clients, Partition) else len(self.clients[i])

    @property
    def sizes_known(self) -> bool:
        """Whether `sizes` is known without reading any client's data."""
        return True

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Every client's number of examples."""
        if isinstance(self.clients, Partition):
            return self.clients.sizes
        return np.fromiter((self.size(i) for i in range(len(self))), np.int64, len(self))

    def indices(self, i: int) -> Rows:
        """Client i's indices into `train`. DataError if one is out of range."""
        if self._all_in_range:
            return self.clients[i]  # type: ignore[return-value]
        return self.train.checked(self.clients[i]).numpy()

    @cached_property
    def _all_in_range(self) -> bool:
        """Whether the clients are a Partition, whose indices never change, and none is out of range."""
        if not isinstance(self.clients, Partition):
            return False
        found = self.clients.indices
        return not len(found) or bool(found.min() >= 0 and found.max() < len(self.train))

    def client(self, i: int) -> Examples:
        """Client i's examples. DataError if they cannot be read."""
        return self.train.subset(self.clients[i])

    def some(self, most: int) -> Examples:
        """A few examples of some client, to try a model on."""
        someone = next((i for i in range(len(self)) if self.size(i)), None)
        if someone is None:
            return self.train.subset([])
        first = self.indices(someone)[:1]
        others = np.setdiff1d(np.arange(min(most, len(self.train))), first)[: most - 1]
        return self.train.subset(np.concatenate([first, others]))

    def expect_classes(self, classes: int, ignored: int) -> None:
        """DataError if a client's target is neither 0 to classes - 1 nor `ignored`."""
        if (found := self.train.no_class(classes, ignored)) is not None:
            row, target = found
            held = (i for i in range(len(self)) if row in self.indices(i))
            raise DataError(f"client {next(held, 0)} has the target {target}: {of_classes(classes, ignored)}")

    def pool(self, clients: Sequence[int]) -> tuple[Examples, dict[int, Rows], dict[int, str]]:
        """(examples, each client's rows of them, why the others' data could not be read) for a cohort."""
        return self.train, {client: self.indices(client) for client in clients}, {}

    @property
    def pooled(self) -> bool:
        """Whether `pool` always returns the same examples."""
        return True

    @property
    def has_personal(self) -> bool:
        """Whether each client has its own test data."""
        return self.test_clients is not None or self.personal is not None

    def client_test(self, i: int) -> Examples:
        if self.personal is not None:
            test, indices = self.personal
            return test.subset(indices[i])
        if self.test_clients is not None:
            return self.train.subset(self.test_clients[i])
        raise ConfigError("personal evaluation needs each client's test data: set test_clients or personal.")
