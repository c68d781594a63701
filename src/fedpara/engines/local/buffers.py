"""BufferSlots: resets a model's buffers between clients, undoing what forward passes did to them.

A forward pass may write to a buffer, as BatchNorm does, or replace it by another tensor. Non-persistent buffers are
in no state dict. Neither change may reach the next client.
"""

import torch
from torch import Tensor, nn


class BufferSlots:
    def __init__(self, model: nn.Module) -> None:
        named = [
            (module, name, tensor) for module in model.modules() for name, tensor in module._buffers.items()
        ]
        self._slots = named
        self._owner = {id(tensor): (module, name) for module, name, tensor in reversed(named)}
        self._unsaved = [
            (tensor, tensor.clone())
            for module, name, tensor in named
            if tensor is not None and name in module._non_persistent_buffers_set
        ]

    def now(self, tensor: Tensor) -> Tensor:
        """The current tensor in the slot of one of the original buffers."""
        module, name = self._owner[id(tensor)]
        current = module._buffers[name]
        assert current is not None
        return current

    def replaced(self) -> str:
        """The name of a slot whose tensor was replaced, or ""."""
        return next((name for module, name, tensor in self._slots if module._buffers[name] is not tensor), "")

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the original buffers back; non-persistent ones also get their original values."""
        for module, name, tensor in self._slots:
            if module._buffers[name] is not tensor:
                module._buffers[name] = tensor
        for tensor, first in self._unsaved:
            tensor.copy_(first)
