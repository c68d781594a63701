"""Random streams by name: neither the order of the clients nor the engine changes what a client draws.

Every draw of a run comes from (seed, purpose, round, client), so there is no generator state to save.
"""

from typing import Literal

import numpy as np
import torch

Purpose = Literal["cohort", "batches", "layers", "link-up", "link-down"]
_PURPOSES: tuple[Purpose, ...] = ("cohort", "batches", "layers", "link-up", "link-down")


def numbers(seed: int, purpose: Purpose, round: int, client: int = 0) -> np.random.Generator:
    return np.random.default_rng((seed, _PURPOSES.index(purpose), round, client))


def torch_seed(seed: int, purpose: Purpose, round: int, client: int = 0) -> int:
    """One integer of the same stream, for torch's generators."""
    sequence = np.random.SeedSequence((seed, _PURPOSES.index(purpose), round, client))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_numbers(seed: int, purpose: Purpose, round: int, client: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(torch_seed(seed, purpose, round, client))


def cohort(seed: int, round: int, clients: int, size: int) -> list[int]:
    """`size` of `clients` without replacement, in time and memory of the cohort, not of the federation."""
    generator = numbers(seed, "cohort", round)
    if size == clients:
        return list(range(clients))
    chosen: dict[int, None] = {}
    while len(chosen) < size:
        for client in generator.integers(0, clients, size=size - len(chosen)).tolist():
            chosen.setdefault(client)
    return sorted(chosen)
