"""BufferSlots: a model's buffers as they were before a client, whatever its forward passes made of them.

A forward pass may write into a buffer, as BatchNorm does, or put another tensor in its place; and a buffer that
no state dict holds is nobody's to send. Neither may reach the next client.
"""

import torch
from torch import Tensor, nn


class BufferSlots:
    def __init__(self, model: nn.Module) -> None:
        named = [
            (module, name, tensor) for module in model.modules() for name, tensor in module._buffers.items()
        ]
        self._places = named
        self._owner = {id(tensor): (module, name) for module, name, tensor in reversed(named)}
        self._unsaved = [
            (tensor, tensor.clone())
            for module, name, tensor in named
            if tensor is not None and name in module._non_persistent_buffers_set
        ]

    def now(self, tensor: Tensor) -> Tensor:
        """What lies in the place of one of the model's first buffers."""
        module, name = self._owner[id(tensor)]
        current = module._buffers[name]
        assert current is not None
        return current

    def replaced(self) -> str:
        """The name of a place that holds another tensor than the first, or ""."""
        return next(
            (name for module, name, tensor in self._places if module._buffers[name] is not tensor), ""
        )

    @torch.no_grad()
    def restore(self) -> None:
        """The first buffers in their places; those in no state dict with their first values."""
        for module, name, tensor in self._places:
            if module._buffers[name] is not tensor:
                module._buffers[name] = tensor
        for tensor, first in self._unsaved:
            tensor.copy_(first)
