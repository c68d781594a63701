"""FederatedData: which client holds which examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedpara.data.examples import Examples, Indices
from fedpara.data.partition import Partition
from fedpara.errors import ConfigError


@dataclass(frozen=True, eq=False)
class FederatedData:
    """`clients[i]` are the indices into `train` that client i trains on.

    `clients` may be lazy: only `len()` and `[i]` are used. For personal evaluation set `test_clients`, the indices into
    `train` that each client holds out (`data.split`), or `personal = (test, indices)`, each client's indices into
    another set (`data.personal_test`).
    """

    train: Examples
    clients: Sequence[Indices]
    test_clients: Sequence[Indices] | None = None
    personal: tuple[Examples, Sequence[Indices]] | None = None

    def __post_init__(self) -> None:
        if self.test_clients is not None and self.personal is not None:
            raise ConfigError("test_clients and personal are both set: expected at most one of them.")
        tests = self.test_clients if self.personal is None else self.personal[1]
        if tests is not None and len(tests) != len(self.clients):
            raise ConfigError(f"test data for {len(tests)} clients: expected {len(self.clients)}.")

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
        """Client i's indices into `train`. DataError if one is out of range."""
        return self.train.checked(self.clients[i]).numpy()

    def client(self, i: int) -> Examples:
        return self.train.subset(self.clients[i])

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
