"""Which clients are hostile, and a federation with their examples poisoned."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedpara.algorithms.core import custom
from fedpara.attacks.core import Attack
from fedpara.data import Examples, FederatedData
from fedpara.data.examples import Indices
from fedpara.data.loaded import LoadedData
from fedpara.errors import ConfigError
from fedpara.trees import join

HOSTILE = 26
"""Separates these draws from the engines' streams, whose second number is smaller."""


def hostile_clients(seed: int, clients: int, share: float) -> frozenset[int]:
    """round(share * clients) clients, drawn from the seed; at least one."""
    count = max(1, round(share * clients))
    drawn = np.random.default_rng((seed, HOSTILE)).choice(clients, count, replace=False, shuffle=False)
    return frozenset(drawn.tolist())


class _Changed(Sequence[Indices]):
    """The clients' indices, with those of hostile clients replaced."""

    def __init__(self, clients: Sequence[Indices], changed: Mapping[int, Indices]) -> None:
        self._clients, self._changed = clients, changed

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, i: int) -> Indices:  # type: ignore[override]
        return self._changed[i] if i in self._changed else self._clients[i]


def poisoned(attack: Attack, data: FederatedData, hostile: frozenset[int], seed: int) -> FederatedData:
    """The federation in which hostile clients train on poisoned copies of their examples. `data` is unchanged."""
    change = attack.poison
    if change is None or not hostile:
        return data

    def of(client: int, examples: Examples) -> Examples:
        what = f"attack {attack.name!r}: poison"
        with custom(what, "poison(examples, generator)"):
            made = change(examples, np.random.default_rng((seed, HOSTILE, client)))
        if not isinstance(made, Examples) or len(made) != len(examples):
            got = f"{len(made)} examples" if isinstance(made, Examples) else type(made).__name__
            raise ConfigError(
                f"{what} returned {got}: expected {len(examples)} examples, as many as it was given."
            )
        return made

    if isinstance(data, LoadedData):
        return _loaded(data, lambda client, found: of(client, found) if client in hostile else found)
    changed: dict[int, Indices] = {}
    end, parts = len(data.train), [data.train]
    for client in sorted(hostile):
        held = data.client(client)
        if len(held):
            parts.append(of(client, held))
            changed[client] = np.arange(end, end + len(held))
            end += len(held)
    inputs, targets = (join([getattr(part, name) for part in parts]) for name in ("inputs", "targets"))
    train = replace(data.train, inputs=inputs, targets=targets, owners=None)  # clients are chosen already
    return replace(data, train=train, clients=_Changed(data.clients, changed))


def _loaded(data: LoadedData, change: Callable[[int, Examples], Examples]) -> LoadedData:
    return LoadedData(
        read=lambda client: change(client, data._read(client)),
        count=len(data),
        read_test=data._read_test,
        given=data.sizes.tolist() if data.sizes_known else None,
        test=data.test,
    )
