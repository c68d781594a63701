"""One client's training in one round: what its steps compute with, and what each step reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpara.algorithms import Algorithm, Local, Variables
from fedpara.algorithms.optimizers import Optimizer
from fedpara.engines.local.augment import draw
from fedpara.engines.local.batches import batches
from fedpara.engines.rng import numpy_rng, torch_seed
from fedpara.state import State


@dataclass(frozen=True)
class Training:
    algorithm: Algorithm
    local: Local  # the client's
    optimizer: Optimizer
    x: State
    y: State  # the shared parameters of the model that trains; steps update them in place
    down: Variables
    client: Variables


@dataclass(frozen=True)
class Plan:
    """What each step of a client reads, on the device."""

    batches: tuple[Tensor, ...]  # int64 [batch]: indices into the client's examples
    crops: tuple[Tensor, ...]  # uint8 [3, batch], with crop-flip augmentation; otherwise ()
    rates: Sequence[float]
    stream: int  # the client's seed for dropout

    @property
    def steps(self) -> int:
        return len(self.batches)


def make_plan(
    examples: int, local: Local, crops: bool, device: torch.device, *, seed: int, round: int, who: int
) -> Plan:
    """The steps of client `who` in this round."""
    order = list(batches(examples, local, numpy_rng(seed, "batches", round, who)))
    windows: list[NDArray[np.uint8]] = []
    if crops:
        generator = numpy_rng(seed, "augment", round, who)
        windows = [draw(len(index), generator) for index in order]
    return Plan(
        _on_device(order, device),
        _on_device(windows, device),
        local.rates(round, local.steps_for(examples)),
        torch_seed(seed, "layers", round, who),
    )


def _on_device(
    parts: Sequence[NDArray[np.int64] | NDArray[np.uint8]], device: torch.device
) -> tuple[Tensor, ...]:
    """Arrays whose shapes differ only in the last dimension, moved to the device with one copy."""
    if not parts:
        return ()
    whole = torch.from_numpy(np.concatenate(parts, axis=-1)).to(device)
    return torch.split(whole, [part.shape[-1] for part in parts], dim=-1)
