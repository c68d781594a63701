"""Worker: one copy of the model, on which clients train and are scored one after another.

    K times:  g = clip(grad of L at y);  g = correct(g, y, x, down, client);  y = sgd_step(y, g)

The model's tensors are updated in place, and states are copied in and out: a plain PyTorch loop, plus the algorithm's
correction.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedpara import parameterization
from fedpara.algorithms import Algorithm, Local, Variables, clip_by_norm, sgd_step
from fedpara.data import Examples, normalise
from fedpara.engines.local.augment import crop_flip, draw
from fedpara.engines.local.batches import batches
from fedpara.engines.local.buffers import BufferSlots
from fedpara.engines.local.dropout import layer_seed, seeded_dropouts, step_seed
from fedpara.engines.program import Program, named_tensors
from fedpara.engines.rng import LayerRng, numpy_rng, torch_seed
from fedpara.engines.task import Augment
from fedpara.state import State

EVALUATION_BATCH = 500
GPU_FACTOR = 4
"""Evaluation batches are this many times larger on a GPU, where small batches of an LSTM would wait for Python."""


@dataclass(frozen=True)
class Trained:
    parameters: State
    buffers: State
    loss: float
    steps: int
    finite: bool | None = None  # set if the engine has checked it

    @property
    def state(self) -> State:
        return {**self.parameters, **self.buffers}


@dataclass(frozen=True)
class Score:
    correct: int
    examples: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.examples if self.examples else float("nan")


class Worker:
    def __init__(
        self, program: Program, augment: Augment = "none", device: torch.device | None = None
    ) -> None:
        self.program = program
        self.augment = augment
        self.model = deepcopy(program.model).to(device or torch.device("cpu")).train()
        named = named_tensors(self.model)
        self.parameters = {name: named[name] for name in program.parameters}
        self.buffers = {name: named[name] for name in program.buffers}
        self.slots = BufferSlots(self.model)
        self.dropouts = list(seeded_dropouts(self.model).values())
        self._plain: nn.Module | None = None

    def train(
        self,
        state: Mapping[str, Tensor],
        examples: Examples,
        algorithm: Algorithm,
        x: State,
        down: Variables,
        client: Variables,
        *,
        seed: int,
        round: int,
        who: int,
    ) -> Trained:
        """K local steps from `state` (parameters and buffers) on the client's examples."""
        self._load(state)
        local, eta = algorithm.local, algorithm.local.lr_at(round)
        inputs = normalise(examples.inputs, examples.mean, examples.std)
        order, stream = numpy_rng(seed, "batches", round, who), torch_seed(seed, "layers", round, who)
        crops = numpy_rng(seed, "augment", round, who) if self.augment == "crop-flip" else None
        y = {name: self.parameters[name].detach() for name in x}  # updated in place, so it stays current
        velocity: State = {}
        total, steps = torch.zeros(()), 0
        with LayerRng(seed, round, who):
            for batch in batches(len(examples), local, order):
                index = torch.from_numpy(batch)
                images, labels = inputs.index_select(0, index), examples.labels.index_select(0, index)
                if crops is not None:
                    images = crop_flip(images, torch.from_numpy(draw(len(batch), crops)))
                self._seed(step_seed(stream, steps))
                gradient, loss = self.gradient(images, labels, local, eta)
                if local.clip is not None:
                    gradient = clip_by_norm(gradient, local.clip)
                g = gradient if len(x) == len(gradient) else {name: gradient[name] for name in x}
                gradient = {**gradient, **algorithm.correct(g, y, x, down, client)}
                velocity = self._step(gradient, velocity, local, eta)
                total += loss
                steps += 1
        parameters = {name: t.detach().clone() for name, t in self.parameters.items()}
        buffers = {name: self.slots.now(t).detach().clone() for name, t in self.buffers.items()}
        return Trained(parameters, buffers, float(total) / max(1, steps), steps)

    @torch.no_grad()
    def evaluate(self, state: Mapping[str, Tensor], examples: Examples) -> Score:
        self._load(state)
        correct, loss = 0, 0.0
        size = EVALUATION_BATCH * (GPU_FACTOR if examples.labels.is_cuda else 1)
        self.model.eval()  # training mode is the default: clients train far more often than they are scored
        try:
            with parameterization.composed_once(self.model):
                for start in range(0, len(examples), size):
                    part = slice(start, start + size)
                    labels = examples.labels[part]
                    logits = self.model(normalise(examples.inputs[part], examples.mean, examples.std))
                    correct += int((logits.argmax(1) == labels).sum())
                    loss += float(cross_entropy(logits, labels, reduction="sum"))
        finally:
            self.model.train()
        return Score(correct, len(examples), loss / max(1, len(examples)))

    def _load(self, state: Mapping[str, Tensor]) -> None:
        self.slots.restore()
        with torch.no_grad():
            tensors = self.parameters | self.buffers
            torch._foreach_copy_(list(tensors.values()), [state[name] for name in tensors])

    def _seed(self, step: int) -> None:
        for layer, dropout in enumerate(self.dropouts):
            dropout.seed.fill_(layer_seed(step, layer))
            dropout.calls = 0

    def gradient(self, images: Tensor, labels: Tensor, local: Local, eta: float) -> tuple[State, Tensor]:
        """(the gradient of the loss on one batch, the loss)"""
        if local.jacobian:
            return self._jacobian_gradient(images, labels, local, eta)
        loss = cross_entropy(self.model(images), labels)
        gradients = torch.autograd.grad(
            loss, list(self.parameters.values()), allow_unused=True, materialize_grads=True
        )
        dense = (g.to_dense() if g.is_sparse else g for g in gradients)  # an embedding's may be sparse
        return dict(zip(self.parameters, dense, strict=True)), loss.detach()

    def _jacobian_gradient(
        self, images: Tensor, labels: Tensor, local: Local, eta: float
    ) -> tuple[State, Tensor]:
        if self._plain is None:
            self._plain = self.program.plain().to(images.device)
        plain, forms = self._plain, self.program.forms
        for own, plain_dropout in zip(self.dropouts, seeded_dropouts(plain).values(), strict=True):
            plain_dropout.seed.copy_(own.seed)
            plain_dropout.calls = 0

        def loss(state: State) -> Tensor:
            # Copies: a functional transform must not write to outside tensors.
            buffers = {name: self.slots.now(tensor).clone() for name, tensor in self.buffers.items()}
            return cross_entropy(functional_call(plain, {**state, **buffers}, (images,)), labels)

        parameters = {name: tensor.detach() for name, tensor in self.parameters.items()}
        plain.train()
        gradient, value = parameterization.corrected_grad(
            loss, parameters, forms, eta=eta, lambda_=local.jacobian, norm=local.jacobian_norm
        )
        if self.buffers:
            # The transform discarded the new statistics: one more forward pass computes them.
            with torch.no_grad():
                self.model(images)
        return gradient, value.detach()

    @torch.no_grad()
    def _step(self, gradient: State, velocity: State, local: Local, eta: float) -> State:
        if local.momentum or local.weight_decay:
            y, velocity = sgd_step(self.parameters, gradient, velocity, eta, local)
            torch._foreach_copy_(list(self.parameters.values()), [y[name] for name in self.parameters])
            return velocity
        torch._foreach_add_(
            list(self.parameters.values()), [gradient[n] for n in self.parameters], alpha=-eta
        )
        return velocity
