"""Dropout whose draws depend only on client, round and step: the same in every engine, lane and rank.

    keep[i] = hash(i, seed) >= p 2^32,   seed = the client's stream + step + layer + call

The hash is MurmurHash3's finalizer in integer arithmetic: it works under vmap and compile and needs no generator.
`seeded_dropouts` replaces `nn.Dropout` in an engine's copy of the model. Other random layers draw from torch's
generator.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

_WORD = 0xFFFFFFFF
_STEP, _LAYER, _CALL = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x2545F4914F6CDD1D
_POSITIVE = (1 << 63) - 1

Seed = TypeVar("Seed", int, Tensor)


class SeededDropout(nn.Dropout):
    seed: Tensor  # int64, set before each step
    calls: int  # made in this step so far; each call draws new values

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        positions = torch.arange(input.numel(), device=input.device).view(input.shape)
        call = self._call() * _CALL & _POSITIVE
        seed = (self.seed + call) & _POSITIVE if call else self.seed
        keep = _hashed(positions, seed) >= int(self.p * (_WORD + 1))
        dropped = torch.where(keep, input / (1 - self.p), 0.0)
        return input.copy_(dropped) if self.inplace else dropped

    def _call(self) -> int:
        """The number of this call in the step. In a backward pass, activation checkpointing repeats an earlier call."""
        if torch._C._current_graph_task_id() == -1:
            self.calls += 1
            return self.calls - 1
        if self.calls > 1:
            raise RuntimeError(
                "a checkpointed nn.Dropout is called several times in one step: use a separate layer for each call"
            )
        return 0


def seeded_dropouts(model: nn.Module) -> dict[str, SeededDropout]:
    """Replaces the model's dropout layers in place and returns them by name."""
    found: dict[str, SeededDropout] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Dropout and module.p < 1:
            module.__class__ = SeededDropout
            module.calls = 0  # type: ignore[assignment]
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            module.register_buffer(
                "seed", torch.zeros((), dtype=torch.int64, device=device), persistent=False
            )
        if isinstance(module, SeededDropout):
            found[name] = module
    return found


def step_seed(stream: int, step: int) -> int:
    """The seed of one local step, counted from 0. `stream` is the client's `torch_seed` for "layers"."""
    return (stream + step * _STEP) & _POSITIVE


def layer_seed(step: Seed, layer: int) -> Seed:
    """The seed of one of the model's dropout layers in that step."""
    return (step + (layer * _LAYER & _POSITIVE)) & _POSITIVE


def _hashed(x: Tensor, seed: Tensor) -> Tensor:
    """32 bits per element. Products wrap around; only their low words are used."""
    for part in (seed & _WORD, seed >> 32):
        x = (x ^ part) & _WORD
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
        x = x ^ (x >> 16)
    return x
