"""The local step of many clients as one program on stacked tensors.

    step = vmap over lanes of:  g = grad of the masked mean loss;  clip;  correct;  sgd_step

Everything a step reads lies on the device in fixed lane_state: the data set, the plan [lane, step, batch] of
example indices and its counter, the learning rate, the lanes' states (`lane_state.py`). So on a GPU the step is
compiled, captured once as a CUDA graph, and replayed (`capture.py`): the host does nothing per step.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from fedpara.algorithms import Algorithm, Variables, clip_by_norm, sgd_step
from fedpara.data import normalise, unit_scale
from fedpara.engines.batched.lane_state import LaneState
from fedpara.engines.local.augment import crop_flip
from fedpara.engines.local.dropout import layer_seed, seeded_dropouts
from fedpara.parameterization import Form, compose_state, corrected_grad
from fedpara.state import State

Precision = Literal["float32", "tf32", "bfloat16"]

# Which arguments of a step are stacked: all but x, down and the learning rate.
LANES_OF_A_STEP = (0, 0, 0, 0, 0, 0, 0, 0, None, None, None)


def one_step(
    plain: nn.Module,
    forms: Mapping[str, Form],
    algorithm: Algorithm,
    precision: Precision,
    shared: tuple[str, ...],
    masked: bool,
) -> Callable[..., tuple[State, State, State, Tensor]]:
    """A pure function of one lane; `vmap` makes it one of all. Unless `masked`, every batch is full."""
    local, dropouts = algorithm.local, seeded_dropouts(plain)

    def loss(
        weights: State, buffers: State, images: Tensor, labels: Tensor, size: Tensor, seed: Tensor
    ) -> tuple[Tensor, State]:
        fresh = {name: tensor.clone() for name, tensor in buffers.items()}
        seeds = {f"{name}.seed": layer_seed(seed, i) for i, name in enumerate(dropouts)}
        given = {**weights, **fresh, **seeds}
        for dropout in dropouts.values():
            dropout.calls = 0
        with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = functional_call(plain, given, (images,))
        fresh = {name: given[name].detach() for name in fresh}  # written to, or another in its place
        each = cross_entropy(logits.float(), labels, reduction="none")
        if not masked:
            return each.mean(), fresh
        mask = torch.arange(len(labels), device=labels.device) < size
        return torch.where(mask, each, 0.0).sum() / size.clamp(min=1), fresh

    def composed(parameters: State, *rest: object) -> tuple[Tensor, State]:
        with torch.autocast(rest[1].device.type, torch.bfloat16, enabled=precision == "bfloat16"):  # type: ignore[attr-defined]
            weights = compose_state(parameters, forms)
        return loss(weights, *rest)  # type: ignore[arg-type]

    def gradient(parameters: State, lr: Tensor, *rest: object) -> tuple[State, Tensor, State]:
        if local.jacobian:
            g, value = corrected_grad(
                lambda weights: loss(weights, *rest)[0],  # type: ignore[arg-type]
                parameters,
                forms,
                eta=lr,
                lambda_=local.jacobian,
                norm=local.jacobian_norm,
            )
            return g, value, {}
        g, (value, fresh) = grad_and_value(composed, has_aux=True)(parameters, *rest)
        return g, value, fresh

    def step(
        parameters: State,
        velocity: State,
        buffers: State,
        own: Variables,
        images: Tensor,
        labels: Tensor,
        size: Tensor,
        seed: Tensor,
        x: State,
        down: Variables,
        lr: Tensor,
    ) -> tuple[State, State, State, Tensor]:
        g, value, fresh = gradient(parameters, lr, buffers, images, labels, size, seed)
        if local.clip is not None:
            g = clip_by_norm(g, local.clip)
        y = {name: parameters[name] for name in shared}
        g = {**g, **algorithm.correct({name: g[name] for name in shared}, y, x, down, own)}
        # A lane that is done stands still: y - 0 g = y costs no pass over the parameters, as choosing would.
        eta = torch.where(size > 0, lr, 0.0) if masked else lr
        stepped, moved = sgd_step(parameters, g, velocity, eta, local)
        if masked:
            moved, fresh = (
                {name: torch.where(size > 0, new[name], old[name]) for name in new}
                for new, old in ((moved, velocity), (fresh, buffers))
            )
            value = torch.where(size > 0, value, 0.0)
        return stepped, moved, fresh, value.detach()

    return step


def make_tick(step: Callable[..., tuple[State, State, State, Tensor]]) -> Callable[[LaneState], None]:
    """One step of all lanes: read the plan at the counter, step, write back, count."""
    stepped = vmap(step, in_dims=LANES_OF_A_STEP, randomness="different")

    def tick(lanes: LaneState) -> None:
        count, width = lanes.plan.shape[0], lanes.plan.shape[2]
        index = lanes.plan.index_select(1, lanes.counter).reshape(-1)
        size = lanes.sizes.index_select(1, lanes.counter)[:, 0]
        seed = lanes.seeds.index_select(1, lanes.counter)[:, 0]
        images = gather(lanes, index)
        if lanes.crops is not None:
            draws = lanes.crops.index_select(1, lanes.counter)[:, 0]
            images = crop_flip(images, draws.transpose(0, 1).reshape(3, -1))
        images = images.reshape(count, width, *images.shape[1:])
        labels = lanes.labels.index_select(0, index).reshape(count, width)
        parameters, velocity, buffers, value = stepped(
            lanes.parameters,
            lanes.velocity,
            lanes.buffers,
            lanes.own,
            images,
            labels,
            size,
            seed,
            lanes.x,
            lanes.down,
            lanes.lr,
        )
        for old, new in (
            (lanes.parameters, parameters),
            (lanes.velocity, velocity),
            (lanes.buffers, buffers),
        ):
            for name, tensor in new.items():
                old[name].copy_(tensor)
        lanes.losses.add_(value)
        lanes.counter.add_(1)

    return tick


def gather(lanes: LaneState, index: Tensor) -> Tensor:
    """The normalised inputs at `index`."""
    raw, scale = lanes.inputs.index_select(0, index), lanes.scale
    return normalise(raw, None, None) if scale is None else (unit_scale(raw) - scale[0]) / scale[1]
