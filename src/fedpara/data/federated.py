"""FederatedData: which client holds which examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedpara.data.examples import Examples, Indices
from fedpara.data.partition import Partition
from fedpara.errors import ConfigError, expect_kind


@dataclass(frozen=True, eq=False)
class FederatedData:
    """`clients[i]` are the indices into `train` that client i trains on.

    Any Sequence will do, a lazy one too: only `len()` and `[i]` are used. For personal evaluation give
    `test_clients`, the indices into `train` that each client holds out (`partition.split`), or
    `personal = (test, indices)`, each client's indices into another set (`partition.personal_test`).
    """

    train: Examples
    clients: Sequence[Indices]
    test_clients: Sequence[Indices] | None = None
    personal: tuple[Examples, Sequence[Indices]] | None = None

    def __post_init__(self) -> None:
        expect_kind("train", self.train, Examples, ConfigError)
        listed = hasattr(self.clients, "__len__") and hasattr(self.clients, "__getitem__")
        if not listed or isinstance(self.clients, Mapping | str):
            raise ConfigError(
                f"clients are of type {type(self.clients).__name__}: expected a sequence of each client's indices."
            )
        if not len(self.clients):
            raise ConfigError("a federation has no clients: expected at least one.")
        if self.test_clients is not None and self.personal is not None:
            raise ConfigError(
                "give test_clients or personal, not both: they are two sources of a client's test data."
            )
        tests = self.test_clients if self.personal is None else self.personal[1]
        if tests is not None and len(tests) != len(self.clients):
            raise ConfigError(
                f"test data for {len(tests)} clients: expected one entry for each of {len(self.clients)}."
            )

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        own = ", each with test data" * self.has_personal
        return f"FederatedData({len(self):,} client{'s' * (len(self) != 1)}{own}\n    train: {self.train!r})"

    def size(self, i: int) -> int:
        return len(self.clients[i])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Every client's number of examples."""
        if isinstance(self.clients, Partition):
            return self.clients.sizes
        return np.fromiter((self.size(i) for i in range(len(self))), np.int64, len(self))

    def indices(self, i: int) -> NDArray[np.int64]:
        """Which examples of `train` client i holds; DataError for what are no indices of it."""
        return self.train.checked(self.clients[i]).numpy()

    def client(self, i: int) -> Examples:
        return self.train.subset(self.clients[i])

    @property
    def has_personal(self) -> bool:
        """Whether each client has test data of its own."""
        return self.test_clients is not None or self.personal is not None

    def client_test(self, i: int) -> Examples:
        if self.personal is not None:
            test, indices = self.personal
            return test.subset(indices[i])
        if self.test_clients is not None:
            return self.train.subset(self.test_clients[i])
        raise ConfigError(
            "personal evaluation needs each client's test data: give FederatedData test_clients or personal."
        )
