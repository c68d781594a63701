"""Worker: one copy of the model, on which clients train and are scored one after another.

    K times:  g = clip(grad of L at y);  g = correct(g, y, x, down, client);  y, slots = step(y, g, slots, eta)

The model's tensors are updated in place, and states are copied in and out: a plain PyTorch loop, plus the algorithm's
correction.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedpara import parameterization
from fedpara.algorithms import Algorithm, Local, Variables, clip_by_norm
from fedpara.algorithms.core import Distill
from fedpara.algorithms.optimizers import Optimizer, Rate, Slots, build_optimizer
from fedpara.cuda_graphs import Recorder
from fedpara.data import Examples
from fedpara.engines.device import widened
from fedpara.engines.local.augment import crop_flip
from fedpara.engines.local.buffers import BufferSlots
from fedpara.engines.local.captured import CapturedSteps
from fedpara.engines.local.dropout import layer_seed, seeded_dropouts, step_seed
from fedpara.engines.local.received import Received
from fedpara.engines.local.training import Plan, Training, make_plan
from fedpara.engines.program import Program, named_tensors
from fedpara.engines.rng import LayerRng
from fedpara.engines.settings import Precision
from fedpara.engines.transfer import HOST, move, move_variables
from fedpara.layout import by_type, cut
from fedpara.state import State, clone, device_of
from fedpara.tasks import Score, Task
from fedpara.tasks.losses import mean_loss
from fedpara.tasks.metrics import Totals, summed
from fedpara.trees import Tree, arguments, map_tree, take

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
    slots: Slots = field(default_factory=dict)  # the optimizer's, after the last step
    blocks: State = field(default_factory=dict)  # on a GPU, if it stays: the tensors of each type as one

    @property
    def state(self) -> State:
        return {**self.parameters, **self.buffers}

    @property
    def device(self) -> torch.device:
        return device_of([self.parameters])


class Worker:
    def __init__(
        self,
        program: Program,
        task: Task,
        device: torch.device | None = None,
        precision: Precision = "float32",
        stay: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """With `stay`, trained states stay on the device; otherwise they move to the host.

        With a `recorder`, local steps are recorded and replayed where they can be.
        """
        self.precision, self.stay = precision, stay
        self.program = program
        self.task = task
        self.device = device or HOST
        self.model = deepcopy(program.model).to(self.device).train()
        named = named_tensors(self.model)
        self.parameters = {name: named[name] for name in program.parameters}
        self.buffers = {name: named[name] for name in program.buffers}
        self.frozen = {name: named[name] for name in program.frozen}
        self.slots = BufferSlots(self.model)
        self.dropouts = list(seeded_dropouts(self.model).values())
        self.received: Received | None = None
        self.captured: CapturedSteps | None = None
        if recorder is not None:
            self.captured = CapturedSteps(
                self.model, self.parameters, self.dropouts, task.objective, recorder
            )

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
        slots: Slots | None = None,
        gradient: Callable[[Tree, Tree], tuple[State, Tensor]] | None = None,
    ) -> Trained:
        """K local steps from `state` (parameters and buffers) on the client's examples.

        `slots` are the optimizer's from an earlier round, if the client keeps them. `gradient(inputs, targets)`
        replaces the gradient and the loss of a batch.
        """
        self._load(state)
        if algorithm.distill is not None:
            self.received = self.received or Received(self.program, self.device)
            self.received.load(state)
        local = algorithm.local.of(who)
        training = Training(
            algorithm,
            local,
            build_optimizer(algorithm.local),
            move(x, self.device),
            {name: self.parameters[name].detach() for name in x},
            move_variables(down, self.device),
            move_variables(client, self.device),
        )
        examples = examples.on(self.device)
        crops = self.task.augment == "crop-flip"
        plan = make_plan(len(examples), local, crops, self.device, seed=seed, round=round, who=who)
        inputs, targets = examples.normalised(), examples.targets
        kept = move_variables(slots, self.device) if slots else None
        with LayerRng(seed, round, who, self.device):
            if self.captured is not None and self.captured.takes(training, private=gradient is not None):
                slots, total = self.captured.run(self._local_step, training, inputs, targets, plan, kept)
                slots = map_tree(torch.clone, slots) if local.keep_optimizer else {}
            else:
                slots, total = self._steps(training, inputs, targets, plan, kept, gradient)
        whole = {name: tensor.detach() for name, tensor in self.parameters.items()}
        buffers = {name: self.slots.now(tensor).detach() for name, tensor in self.buffers.items()}
        copied, blocks = self._copied({**whole, **buffers})
        parameters, buffers = ({name: copied[name] for name in part} for part in (whole, buffers))
        last = move_variables(slots, HOST) if local.keep_optimizer else {}
        lost, finite = _read(total, blocks)
        return Trained(parameters, buffers, lost / max(1, plan.steps), plan.steps, finite, last, blocks)

    def _steps(
        self,
        training: Training,
        inputs: Tree,
        targets: Tree,
        plan: Plan,
        slots: Slots | None,
        gradient: Callable[[Tree, Tree], tuple[State, Tensor]] | None,
    ) -> tuple[Slots, Tensor]:
        """All steps of a client. (the optimizer's slots, the sum of the losses)"""
        whole = {name: tensor.detach() for name, tensor in self.parameters.items()}
        # Copies: steps in place must not write to the client's memory.
        slots = map_tree(torch.clone, slots) if slots else training.optimizer.init(whole)
        exact = any(tensor.dtype == torch.float64 for tensor in whole.values())
        total = torch.zeros((), device=self.device, dtype=torch.float64 if exact else torch.float32)
        for step, index in enumerate(plan.batches):
            some = take(inputs, index)
            if plan.crops:
                some = crop_flip(some, plan.crops[step])
            self._seed(step_seed(plan.stream, step))
            slots, loss = self._local_step(
                some, take(targets, index), training, slots, plan.rates[step], gradient
            )
            total += loss
        return slots, total

    def _local_step(
        self,
        inputs: Tree,
        targets: Tree,
        training: Training,
        slots: Slots,
        eta: Rate,
        gradient: Callable[[Tree, Tree], tuple[State, Tensor]] | None = None,
    ) -> tuple[Slots, Tensor]:
        """One step on one batch. (the optimizer's slots, the loss)"""
        t, local = training, training.local
        found, loss = (
            gradient(inputs, targets)
            if gradient
            else self.gradient(inputs, targets, local, eta, t.algorithm.distill)
        )
        if local.clip is not None:
            found = clip_by_norm(found, local.clip)
        g = found if len(t.x) == len(found) else {name: found[name] for name in t.x}
        found = {**found, **t.algorithm.correct(g, t.y, t.x, t.down, t.client)}
        return self._step(t.optimizer, found, slots, eta), loss

    @torch.no_grad()
    def evaluate(self, state: Mapping[str, Tensor], examples: Examples) -> Score:
        self._load(state)
        examples = examples.on(self.device)
        totals = {name: Totals(metric) for name, metric in self.task.scored.items()}
        size = EVALUATION_BATCH * (1 if self.device == HOST else GPU_FACTOR)
        self.model.eval()  # training mode is the default: clients train far more often than they are scored
        try:
            with parameterization.composed_once(self.model):
                for start in range(0, len(examples), size):
                    part = examples.part(slice(start, start + size))
                    output = self.output(part.normalised())
                    for name, metric in self.task.scored.items():
                        totals[name].add(*summed(metric.of(output, part.targets)))
        finally:
            self.model.train()
        values = {name: total.score() for name, total in totals.items()} if len(examples) else {}
        return Score(len(examples), values)

    def output(self, inputs: Tree) -> Tree:
        args, kwargs = arguments(inputs)
        return self.model(*args, **kwargs)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        self.slots.restore()
        with torch.no_grad():
            moved = {
                name: tensor for name, tensor in self.frozen.items() if name in state
            }  # the base, if it moves
            tensors, state = self.parameters | self.buffers | moved, move(state, self.device)
            torch._foreach_copy_(list(tensors.values()), [state[name] for name in tensors])

    def _copied(self, state: State) -> tuple[State, State]:
        """(a copy of the state, on the host unless it may `stay`; on a GPU cut from one block per type, the blocks)"""
        if self.device == HOST:
            return clone(state), {}
        if not self.stay:
            return move(state, HOST), {}
        copied: State = {}
        blocks: State = {}
        for names in by_type(state):
            block = torch.cat([state[name].reshape(-1) for name in names])
            blocks[str(block.dtype)] = block
            copied |= cut(block, state, names)
        return copied, blocks

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def _seed(self, step: int) -> None:
        for layer, dropout in enumerate(self.dropouts):
            dropout.seed.fill_(layer_seed(step, layer))
            dropout.calls = 0

    def gradient(
        self, inputs: Tree, targets: Tree, local: Local, eta: Rate, distill: Distill | None = None
    ) -> tuple[State, Tensor]:
        """(the gradient of the loss on one batch, the loss)"""

        def loss(output: Tree) -> Tensor:
            output = widened(output)
            value = mean_loss(self.task.objective(output, targets))
            if distill is None or self.received is None:
                return value
            with self._autocast():
                received = self.received.output(inputs)
            return value + mean_loss(distill(output, targets, widened(received)))

        if local.jacobian:
            return self._jacobian_gradient(inputs, loss, local, eta)
        with self._autocast():
            output = self.output(inputs)
        return self._backward(loss(output), self.parameters)

    def _backward(self, loss: Tensor, leaves: State) -> tuple[State, Tensor]:
        """(the gradient of the loss with respect to the leaves, the loss)"""
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        dense = (g.to_dense() if g.is_sparse else g for g in gradients)  # an embedding's may be sparse
        return dict(zip(leaves, dense, strict=True)), loss.detach()

    def _jacobian_gradient(
        self, inputs: Tree, loss: Callable[[Tree], Tensor], local: Local, eta: Rate
    ) -> tuple[State, Tensor]:
        """`gradient` with the Jacobian correction, which needs the gradient at the composed weights."""
        bound = parameterization.forms(self.model)  # W0 is on the device
        forms = {name: bound[name] for name in self.program.forms}

        def backward(plain: State) -> tuple[State, Tensor]:
            given = {name: plain[name].detach().requires_grad_() for name in forms}
            with parameterization.composed_once(self.model, given), self._autocast():
                output = self.output(inputs)
            leaves = {name: given[name] if name in given else self.parameters[name] for name in plain}
            return self._backward(loss(output), leaves)

        return parameterization.corrected_backward(
            backward,
            {name: tensor.detach() for name, tensor in self.parameters.items()},
            forms,
            eta=eta,
            lambda_=local.jacobian,
            norm=local.jacobian_norm,
            autocast=self._autocast,
        )

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, gradient: State, slots: Slots, eta: Rate) -> Slots:
        if optimizer.in_place is not None:
            optimizer.in_place(self.parameters, gradient, slots, eta)
            return slots
        y, slots = optimizer.step(self.parameters, gradient, slots, eta)
        torch._foreach_copy_(list(self.parameters.values()), [y[name] for name in self.parameters])
        return slots


def _read(total: Tensor, blocks: State) -> tuple[float, bool | None]:
    """(the total, True if all numbers of the blocks are known to be finite), with one wait for the device."""
    if not blocks:
        return float(total), None
    # As `state.all_finite`: x . x is finite only if every entry is. If it overflows, each entry is checked later.
    squares = (torch.dot(block, block) for block in blocks.values() if block.is_floating_point())
    first, *rest = torch.stack([one.double() for one in (total, *squares)]).tolist()
    return first, True if all(map(math.isfinite, rest)) else None
