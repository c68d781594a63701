"""Received: the model that a client received, for an algorithm that compares outputs with its own (`distill`).

It is in evaluation mode and does not train. Its tensors keep their addresses, because captured steps read them.
"""

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from fedpara.engines.program import Program, named_tensors
from fedpara.trees import Tree, arguments


class Received:
    def __init__(self, program: Program, device: torch.device) -> None:
        self._model: nn.Module = deepcopy(program.model).to(device).eval().requires_grad_(False)
        self._tensors = named_tensors(self._model)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes in the model's tensors; those that are missing stay."""
        for name, tensor in state.items():
            if name in self._tensors:
                self._tensors[name].copy_(tensor)

    @torch.no_grad()
    def output(self, inputs: Tree) -> Tree:
        args, kwargs = arguments(inputs)
        return self._model(*args, **kwargs)
