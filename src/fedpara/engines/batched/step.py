"""The local step of many clients as one program on stacked tensors.

    step = vmap over lanes of:  g = grad of the masked mean loss;  clip;  correct;  the optimizer's step

Everything a step reads is on the device at fixed addresses: the lanes' states (`lane_state.py`), the examples and the
plan, from which it gathers a batch (`feed.py`). So on a GPU the step is compiled, captured once as a CUDA graph with
the gathering, and replayed (`capture.py`): the host does nothing per step.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedpara.algorithms import Algorithm, Variables, clip_by_norm
from fedpara.algorithms.optimizers import Slots, build_optimizer
from fedpara.data import normalise, unit_scale
from fedpara.engines.batched.feed import Batch
from fedpara.engines.batched.kernels.masked_norm import masked_norms
from fedpara.engines.batched.lane_state import LaneState
from fedpara.engines.device import widened
from fedpara.engines.local.augment import crop_flip
from fedpara.engines.local.dropout import layer_seed, seeded_dropouts
from fedpara.engines.program import Program
from fedpara.engines.settings import Precision
from fedpara.parameterization import Form, compose_state, corrected_backward
from fedpara.state import State
from fedpara.tasks import Loss
from fedpara.tasks.losses import mean_loss
from fedpara.trees import Tree, arguments, leaves, map_tree

# All arguments of a step are stacked except x, down and beside.
LANES_OF_A_STEP = (0, 0, 0, 0, 0, 0, 0, 0, 0, None, None, None, 0)
Step = Callable[..., tuple[State, Slots, State, Tensor]]


def one_step(
    plain: nn.Module,
    forms: Mapping[str, Form],
    objective: Loss,
    algorithm: Algorithm,
    precision: Precision,
    program: Program,
    masked: bool,
) -> Step:
    """A pure function of one lane, for `vmap`. Unless `masked`, every batch is full."""
    shared, distill = program.shared, algorithm.distill
    received_model = None if distill is None else program.plain().to(next(plain.parameters()).device).eval()
    local, dropouts, norms = algorithm.local, seeded_dropouts(plain), masked_norms(plain)
    optimizer = build_optimizer(local)
    device = next(plain.parameters()).device.type

    def autocast() -> torch.autocast:
        return torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")

    def loss(
        weights: State,
        buffers: State,
        inputs: Tree,
        targets: Tree,
        size: Tensor,
        seed: Tensor,
        received: Tree,
    ) -> tuple[Tensor, State]:
        fresh = {name: tensor.clone() for name, tensor in buffers.items()}
        seeds = {f"{name}.seed": layer_seed(seed, i) for i, name in enumerate(dropouts)}
        sizes = {f"{name}.size": size for name in norms}
        given = {**weights, **fresh, **seeds, **sizes}
        width = len(leaves(inputs)[0])
        for dropout in dropouts.values():
            dropout.calls = 0
        for norm in norms.values():
            norm.width = width if masked else None
        with autocast():
            output = functional_call(plain, given, *arguments(inputs))
        fresh = {name: given[name].detach() for name in fresh}  # updated in place, or replaced
        output = widened(output)
        counts = torch.arange(width, device=size.device) < size if masked else None
        value = mean_loss(objective(output, targets), counts)
        if distill is not None:
            value = value + mean_loss(distill(output, targets, received), counts)
        return value, fresh

    def output_of_received(x: State, beside: State, entered: State, inputs: Tree) -> Tree:
        """The output of the model that the client received. vmap composes weights that are alike in all lanes once."""
        if received_model is None:
            return None
        with autocast():
            weights = compose_state({**x, **beside, **entered}, forms)
            return widened(functional_call(received_model, weights, *arguments(inputs)))

    def composed(parameters: State, beside: State, *rest: object) -> tuple[Tensor, State]:
        with autocast():
            weights = compose_state({**parameters, **beside}, forms)
        return loss(weights, *rest)  # type: ignore[arg-type]

    def gradient(parameters: State, beside: State, lr: Tensor, *rest: object) -> tuple[State, Tensor, State]:
        if local.jacobian:
            g, (value, fresh) = corrected_backward(
                lambda weights: grad_and_value(loss, has_aux=True)(weights, *rest),  # type: ignore[arg-type]
                parameters,
                forms,
                eta=lr,
                lambda_=local.jacobian,
                norm=local.jacobian_norm,
                autocast=autocast,
            )
            return g, value, fresh
        g, (value, fresh) = grad_and_value(composed, has_aux=True)(parameters, beside, *rest)
        return g, value, fresh

    def step(
        parameters: State,
        slots: Slots,
        buffers: State,
        own: Variables,
        inputs: Tree,
        targets: Tree,
        size: Tensor,
        seed: Tensor,
        lr: Tensor,
        x: State,
        down: Variables,
        beside: State,
        entered: State,
    ) -> tuple[State, Slots, State, Tensor]:
        received = output_of_received(x, beside, entered, inputs)
        g, value, fresh = gradient(parameters, beside, lr, buffers, inputs, targets, size, seed, received)
        if local.clip is not None:
            g = clip_by_norm(g, local.clip)
        y = {name: parameters[name] for name in shared}
        g = {**g, **algorithm.correct({name: g[name] for name in shared}, y, x, down, own)}
        # eta = 0 freezes a lane that is done; torch.where on the parameters would cost one more pass over them.
        eta = torch.where(size > 0, lr, 0.0) if masked else lr
        stepped, moved = optimizer.step(parameters, g, slots, eta)
        if masked:
            moved, fresh = (
                map_tree(lambda new, old: torch.where(size > 0, new, old), new, old)
                for new, old in ((moved, slots), (fresh, {name: buffers[name] for name in fresh}))
            )
            value = torch.where(size > 0, value, 0.0)
        return stepped, moved, fresh, value.detach()

    return step


Tick = Callable[[LaneState, Batch], None]


def make_tick(step: Step) -> Tick:
    """One step of all lanes on a batch; writes the new states back."""
    stepped = vmap(step, in_dims=LANES_OF_A_STEP, randomness="different")

    def tick(lanes: LaneState, batch: Batch) -> None:
        inputs = prepared(lanes, batch)
        inputs, targets = (
            map_tree(lambda tensor: tensor.reshape(batch.lanes, batch.width, *tensor.shape[1:]), tree)
            for tree in (inputs, batch.targets)
        )
        parameters, slots, buffers, value = stepped(
            lanes.parameters,
            lanes.slots,
            lanes.buffers,
            lanes.own,
            inputs,
            targets,
            batch.sizes,
            batch.seeds,
            batch.rates,
            lanes.x,
            lanes.down,
            lanes.beside,
            lanes.entered,
        )
        for old, new in ((lanes.parameters, parameters), (lanes.slots, slots), (lanes.buffers, buffers)):
            map_tree(lambda fresh, kept: kept.copy_(fresh), new, {name: old[name] for name in new})
        lanes.losses.add_(value)

    return tick


def prepared(lanes: LaneState, batch: Batch) -> Tree:
    """The batch's inputs, normalised and cropped."""
    raw, scale = batch.inputs, lanes.scale
    inputs = normalise(raw, None, None) if scale is None else (unit_scale(raw) - scale[0]) / scale[1]
    if batch.crops is None:
        return inputs
    return crop_flip(inputs, batch.crops.transpose(0, 1).reshape(3, -1))
