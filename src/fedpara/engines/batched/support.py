"""Whether a run can be batched, and why not. One step on one example shows whether vmap supports the model."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedpara.data import FederatedData, normalise
from fedpara.engines.batched.step import LANES_OF_A_STEP, one_step
from fedpara.engines.local.buffers import BufferSlots
from fedpara.engines.session import Session
from fedpara.errors import in_a_line
from fedpara.parameterization import covered
from fedpara.state import State, zeros_like

LANES_THAT_PAY = 5
"""On a CPU fewer lanes are slower than sequential training: benchmarks/README.md."""


def unsupported(session: Session, data: FederatedData) -> str:
    """Why this run cannot be batched, or ""."""
    program, local = session.program, session.algorithm.local
    if local.jacobian and program.buffers:
        return "the Jacobian correction has no batched form for a model with buffers"
    if over := covered(program.model):
        return f"{over} has another parametrization on top of its factors"
    if program.half_frozen:
        return f"some factors of {program.half_frozen} are frozen and others are not"
    someone = next((i for i in range(len(data)) if data.size(i)), None)
    if someone is None:
        return "no client holds an example"
    example = data.train.subset(data.indices(someone)[:1])
    plain = program.plain().train()
    slots = BufferSlots(plain)
    step = one_step(plain, program.forms, session.algorithm, "float32", program.shared, True)
    image = normalise(example.inputs, example.mean, example.std)
    uneven = bool((data.sizes % local.batch_size).any())
    batches = _padded(image, data)[: 1 + uneven]
    try:
        stepped = [_step(step, session, images, example.labels) for images in batches]
    except Exception as error:
        return in_a_line(error)
    if name := slots.replaced():
        return f"the forward pass replaces buffer {name!r} by another tensor"
    if not uneven or _same(*stepped):
        return ""
    if not _same(stepped[0], _step(step, session, batches[0], example.labels, seed=1)):
        return "short batches are padded, and the model has random layers other than nn.Dropout"
    return (
        "short batches are padded, and this model's output for an example depends on the others in its batch, as with "
        "BatchNorm"
    )


def _padded(image: Tensor, data: FederatedData) -> list[Tensor]:
    """Two padded batches of the same image: with itself, and with another example if there is one."""
    some = data.train.subset(range(min(64, len(data.train))))
    others = normalise(some.inputs, some.mean, some.std)
    unlike = next((other[None] for other in others if not torch.equal(other, image[0])), image)
    return [torch.cat([image, image]), torch.cat([image, unlike, image])]


def _step(
    step: Callable[..., tuple[State, State, State, Tensor]],
    session: Session,
    images: Tensor,
    label: Tensor,
    seed: int = 0,
) -> State:
    """The state after one step on a batch of one example and padding."""
    program, algorithm = session.program, session.algorithm
    x = program.start(program.shared)
    parameters = program.start(program.parameters)
    velocity = zeros_like(parameters) if algorithm.local.momentum else {}
    states = [parameters, velocity, program.start(program.buffers)]
    lanes = [_lane(state) for state in states]
    own = {name: _lane(state) for name, state in algorithm.client_init(x).items()}
    down = algorithm.broadcast(algorithm.server_init(x))
    given = (images[None], label.repeat(len(images))[None], torch.tensor([1]), torch.tensor([0]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stepped, _, buffers, _ = vmap(step, in_dims=LANES_OF_A_STEP, randomness="different")(
            *lanes, own, *given, x, down, torch.tensor(0.1)
        )
    return {**stepped, **buffers}


def _lane(state: State) -> State:
    return {name: tensor[None] for name, tensor in state.items()}


def _same(a: State, b: State) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-6, equal_nan=True) for name in a)


def slower_on_cpu(session: Session, lanes: int) -> str:
    """Why sequential training is faster on a CPU, or "". A fixed rule, so that a run always takes the same path.

    benchmarks/README.md: stacked matrix products are 5 to 60% faster, grouped convolutions a third slower.
    """
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in session.program.model.modules()):
        return "stacked convolutions are slower on a CPU"
    if lanes < LANES_THAT_PAY:
        return f"this cohort fills {lanes} lane{'s' * (lanes > 1)}; on a CPU fewer than {LANES_THAT_PAY} are slower"
    return ""
