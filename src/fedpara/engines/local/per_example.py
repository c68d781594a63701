"""Example-level privacy: the gradient of DP-SGD (Abadi et al., 2016), in place of a batch's gradient.

    g = (sum_j g_j min(1, C / ||g_j||) + N(0, (z C)^2)) / B

g_j is the gradient of example j over all tensors that train, and B the size of the batch. Every example passes through
the model alone, so `nn.Dropout` drops the same units for all examples of a batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedpara.engines.device import widened
from fedpara.engines.local.dropout import seeded_dropouts
from fedpara.engines.local.worker import Worker
from fedpara.parameterization import compose_state
from fedpara.privacy import Example
from fedpara.privacy.randomness import Noise, fresh_key, seeded_key
from fedpara.state import State
from fedpara.tasks.losses import mean_loss
from fedpara.trees import Tree, arguments, leaves, map_tree

CHUNK = 1 << 26
"""The largest number of gradient values that are computed together: 256 MB."""

Gradient = Callable[[Tree, Tree], tuple[State, Tensor]]
"""(inputs, targets) -> the gradient of a batch, its loss"""


def private_gradient(worker: Worker, kind: Example, seed: int | None, *where: int) -> Gradient:
    """The noisy gradient of one client's batches. `where` is the round and the client, for a seeded run."""
    noise = Noise(fresh_key() if seed is None else seeded_key(seed, *where))
    plain = worker.program.plain().to(worker.device).train()
    forms = {name: form.on(worker.device) for name, form in worker.program.forms.items()}
    dropouts = seeded_dropouts(plain).values()
    size = sum(tensor.numel() for tensor in worker.parameters.values())

    def loss(parameters: State, inputs: Tree, targets: Tree) -> Tensor:
        one, target = (map_tree(lambda tensor: tensor[None], tree) for tree in (inputs, targets))
        for own, dropout in zip(worker.dropouts, dropouts, strict=True):
            dropout.seed, dropout.calls = own.seed, 0
        output = functional_call(plain, compose_state(parameters, forms), *arguments(one))
        return mean_loss(worker.task.objective(widened(output), target))

    each = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")

    def gradient(inputs: Tree, targets: Tree) -> tuple[State, Tensor]:
        parameters = {name: tensor.detach() for name, tensor in worker.parameters.items()}
        count = len(leaves(inputs)[0])
        total, lost = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}, torch.zeros(())
        step = max(1, CHUNK // max(1, size))
        for start in range(0, count, step):
            part = [
                map_tree(lambda tensor, start=start: tensor[start : start + step], tree)
                for tree in (inputs, targets)
            ]
            found, values = each(parameters, *part)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            factors = (kind.bound / norms).clamp(max=1.0)
            for name, g in found.items():
                total[name] += torch.tensordot(factors, g, 1)
            lost = lost.to(values.device) + values.sum()
        scale, drawn = kind.noise * kind.bound, noise.like(total)
        made = {name: (t + scale * drawn[name].to(t.dtype)) / count for name, t in total.items()}
        return made, (lost / count).detach()

    return gradient
