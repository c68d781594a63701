"""Whether a run can be batched, and why not. One step on one example shows whether vmap supports the model."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from fedpara.algorithms.optimizers import build_optimizer
from fedpara.data import Examples, FederatedData
from fedpara.engines.batched.step import LANES_OF_A_STEP, Step, one_step
from fedpara.engines.local.buffers import BufferSlots
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import Program
from fedpara.engines.session import Session
from fedpara.errors import in_a_line
from fedpara.parameterization import covered
from fedpara.privacy import Example
from fedpara.state import State
from fedpara.tasks import Task
from fedpara.trees import Tree, join, leaves, map_tree, take

LANES_THAT_PAY = 5
"""The fewest lanes that are faster than sequential training on a CPU (benchmarks/README.md)."""
PARTS = 20
"""The number of sub-batches on which a custom loss is compared with the whole batch."""


def unsupported(session: Session, task: Task, data: FederatedData) -> str:
    """Why this run cannot be batched, or ""."""
    reasons = (_unsupported(one, task, data) for one in session.trainings)
    return next(filter(None, reasons), "")


def _unsupported(session: Session, task: Task, data: FederatedData) -> str:
    program, local = session.program, session.algorithm.local
    if isinstance(session.privacy, Example):
        return "example-level privacy needs the gradient of every example"
    if over := covered(program.model):
        return f"{over} has another parametrization on top of its factors"
    if program.half_frozen:
        return f"some factors of {program.half_frozen} are frozen and others are not"
    if session.algorithm.distill is not None and (reason := _why_no_received(program)):
        return reason
    some = data.some(64)
    if not len(some):
        return "no client holds an example"
    example = some.part(slice(1))
    plain = program.plain().train()
    slots = BufferSlots(plain)
    uneven = (
        local.per_client is not None or not data.sizes_known or bool((data.sizes % local.batch_size).any())
    )
    one, several = _padded(some)

    def stepped(session: Session, inputs: Tree, seed: int = 0) -> State:
        step = one_step(plain, program.forms, task.objective, session.algorithm, "float32", program, True)
        return _step(step, session, inputs, example.targets, seed)

    # Adam's first step is as long for a gradient of 1e-8 as for one of 1: it would amplify rounding errors.
    by_sgd = replace(session, algorithm=replace(session.algorithm, local=replace(local, optimizer="sgd")))
    try:
        stepped(session, one)
        alike = not uneven or _same(stepped(by_sgd, one), stepped(by_sgd, several))
    except Exception as error:
        return in_a_line(error)
    if name := slots.replaced():
        return f"the forward pass replaces buffer {name!r} by another tensor"
    if uneven and (reason := _mixing_loss(session, task, some)):
        return reason
    if alike:
        return ""
    if not _same(stepped(by_sgd, one), stepped(by_sgd, one, seed=1)):
        return "short batches are padded, and the model has random layers other than nn.Dropout"
    return (
        "short batches are padded, and this model's output for an example depends on the others in its batch, as with "
        "a custom batch normalisation"
    )


def _why_no_received(program: Program) -> str:
    """Why the outputs of the received model cannot be computed on padded batches, or ""."""
    for name, layer in program.model.named_modules():
        if isinstance(layer, _BatchNorm) and not layer.track_running_stats:
            return f"the loss reads outputs of the received model, whose {name!r} normalises by the batch"
    return ""


def _mixing_loss(session: Session, task: Task, some: Examples) -> str:
    """Why batches for a custom loss must not be padded, or "".

    The loss of an example must be the same in a sub-batch as in the whole batch. A rank or a threshold within the batch
    changes few values, so many sub-batches are compared.
    """
    if isinstance(task.loss, str):
        return ""
    worker, generator = Worker(session.program, task), torch.Generator().manual_seed(0)
    worker.model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output, target = worker.output(some.normalised()), some.targets
            whole = _values(task, output, target)
            for part in range(PARTS):
                size = 1 + part % max(1, len(some) - 1)
                rows = torch.randperm(len(some), generator=generator)[:size]
                found = _values(task, _rows_of(output, rows), take(target, rows))
                if not _same(found, {name: value[rows] for name, value in whole.items()}):
                    return "short batches are padded, and the loss of an example depends on the others in its batch"
    except Exception as error:
        return f"short batches are padded, and the loss fails on some of them: {in_a_line(error)}"
    return ""


def _rows_of(output: Any, rows: Tensor) -> Any:
    """The rows of a model's output, which may be any object: what is no tensor stays as it is."""
    if is_dataclass(output) and not isinstance(output, dict | type):
        parts = {field.name: _rows_of(getattr(output, field.name), rows) for field in fields(output)}
        return replace(output, **parts)
    return tree_map(lambda part: part[rows] if isinstance(part, Tensor) and part.dim() else part, output)


def _values(task: Task, output: Tree, target: Tree) -> State:
    made = task.objective(output, target)
    return dict(zip("sw", made if isinstance(made, tuple) else (made,), strict=False))


def _padded(some: Examples) -> list[Tree]:
    """Two padded batches of the first example: with itself, and with another one if there is one."""
    rows = [some.part(slice(i, i + 1)).normalised() for i in range(len(some))]
    unlike = next((row for row in rows if not _equal(row, rows[0])), rows[0])
    return [join([rows[0], rows[0]]), join([rows[0], unlike, rows[0]])]


def _equal(a: Tree, b: Tree) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def _step(
    step: Step,
    session: Session,
    inputs: Tree,
    target: Tree,
    seed: int = 0,
) -> State:
    """The state after one step on a batch of one example and padding."""
    program, algorithm = session.program, session.algorithm
    x = program.start(program.shared)
    parameters = program.start(program.parameters)
    slots = build_optimizer(algorithm.local).init(parameters)
    lanes = [_lane(tree) for tree in (parameters, slots, program.start(program.buffers))]
    own = _lane(algorithm.client_init(x))
    down = algorithm.broadcast(algorithm.server_init(x))
    targets = join([target] * len(leaves(inputs)[0]))
    given = (_lane(inputs), _lane(targets), torch.tensor([1]), torch.tensor([0]), torch.tensor([0.1]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stepped, _, buffers, _ = vmap(step, in_dims=LANES_OF_A_STEP, randomness="different")(
            *lanes, own, *given, x, down, program.start(session.beside), _lane(program.start(session.entered))
        )
    return {**stepped, **buffers}


def _lane(tree: Tree) -> Tree:
    return map_tree(lambda tensor: tensor[None], tree)


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
