"""Hold out a part of every client's examples of a federation, in memory or read client by client."""

import numpy as np
import torch
from torch import Tensor

from fedpara.data.examples import Examples
from fedpara.data.federated import FederatedData, Rows
from fedpara.data.loaded import LoadedData, concatenated
from fedpara.data.partition import Partition, split
from fedpara.errors import ConfigError, DataError


def hold_out(
    federation: FederatedData, fraction: float, seed: int, personal: bool
) -> tuple[FederatedData, Examples]:
    """(the federation without the held-out examples, the held-out examples of all clients).

    A client with n >= 2 examples gives round(fraction n) of them, between 1 and n - 1, in proportion to its classes. Of
    texts it gives the last ones: their windows overlap, and a label at the end is in no earlier window. If `personal`,
    each client's own model is scored on what the client gave. The federation's own test data is not used.

    Data that is read client by client stays so: a client gives its part whenever it is read. Only the held-out examples
    are in memory, for which every client is read once. A client that cannot be read gives none.
    """
    if federation.pooled:
        rows = [federation.indices(client) for client in range(len(federation))]
        parts = [_divided(federation.train.subset(row), fraction, (seed, i)) for i, row in enumerate(rows)]
        kept, held = (
            Partition.of([row[part[k]] for row, part in zip(rows, parts, strict=True)]) for k in (0, 1)
        )
        scored = federation.train.subset(held.indices)
        found = FederatedData(federation.train, kept, test_clients=held if personal else None)
        return found, _not_empty(scored, fraction)

    def part(client: int, held: bool) -> Examples:
        examples = federation.client(client)
        return examples.subset(_divided(examples, fraction, (seed, client))[held])

    known = federation.sizes - _counts(federation.sizes, fraction) if federation.sizes_known else None
    lazy = LoadedData(
        read=lambda client: part(client, held=False),
        count=len(federation),
        read_test=(lambda client: part(client, held=True)) if personal else None,
        given=None if known is None else known.tolist(),
    )
    held_out = []
    for client in range(len(federation)):
        try:
            held_out.append(part(client, held=True))
        except DataError:
            continue  # the rounds refuse this client and say why
    return lazy, _not_empty(concatenated(held_out), fraction)


def _counts(sizes: Rows, fraction: float) -> Rows:
    """How many examples a client with this many gives."""
    counts: Rows = np.clip(np.rint(fraction * sizes).astype(np.int64), 1, np.maximum(sizes - 1, 1))
    return np.where(sizes > 1, counts, 0)


def _divided(examples: Examples, fraction: float, seed: tuple[int, int]) -> tuple[Rows, Rows]:
    """(rows to train on, rows to hold out) of one client."""
    rows = np.arange(len(examples))
    if len(examples.shape) == 1 and not examples.inputs.is_floating_point():  # character ids
        start = len(rows) - int(_counts(np.array(len(rows)), fraction))
        return rows[:start], rows[start:]
    kept, held = split(Partition.of([rows]), labels_of(examples), fraction, seed, exact=True)
    return kept[0], held[0]


def labels_of(examples: Examples) -> Tensor:
    """The classes; targets that are no classes count as one class."""
    if examples.classes is None:
        return torch.zeros(len(examples), dtype=torch.int64)
    return examples.targets  # type: ignore[no-any-return]


def _not_empty(scored: Examples, fraction: float) -> Examples:
    if not len(scored):
        raise ConfigError(
            f"validation is {fraction}, but no client has an example to spare: use a larger fraction."
        )
    return scored
