"""What every run is checked for.

The algorithm's functions are called once (`algorithm.py`), one gradient is computed on one example (or two, where one
is too few), and one example of each test set is scored.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpara.algorithms import Algorithm, Local
from fedpara.data import Examples, FederatedData
from fedpara.data.federated import of_classes
from fedpara.engines.checks.algorithm import Problem, algorithm_problems
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import Program, named_tensors
from fedpara.engines.secure.checks import secure_problems
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError, DataError, in_a_line
from fedpara.parameterization import covered
from fedpara.tasks import Task, losses, metrics
from fedpara.tasks.losses import IGNORED, mean_loss, problem_of
from fedpara.tasks.metrics import FRACTIONS
from fedpara.tasks.task import LOSS
from fedpara.trees import describe

logger = logging.getLogger(__name__)

CLASSES = {"cross-entropy": 1, "next-token": -1}
"""The dimension of the classes in the output that a loss takes."""
Sample = tuple[Examples, Any]
"""Two examples, and the model's outputs for them."""


def check_run(session: Session, task: Task, data: FederatedData, settings: Settings, personal: bool) -> None:
    """ConfigError for a run that cannot work, with the first problem found."""
    for text, cause in _problems(session, task, data, settings, personal):
        raise ConfigError(text) from cause


def tell_unused_test_set(program: Program, task: Task, personal: bool) -> None:
    """Warns, once a run begins, of a test set that scores no model."""
    if task.test is not None and program.local and not personal:
        logger.warning(
            "the test set is not used: %s stays with each client, so each has its own model. Give the clients test "
            "data, or --personal on the command line, to score these models.",
            min(program.local),
        )


def _problems(
    session: Session, task: Task, data: FederatedData, settings: Settings, personal: bool
) -> Iterator[Problem]:
    program, local = session.program, session.algorithm.local
    if settings.cohort > len(data):
        yield f"a cohort of {settings.cohort} from {len(data)} clients: choose a smaller cohort.", None
    for problem in secure_problems(session, settings):
        yield problem, None
    if task.augment == "crop-flip" and len(data.train.shape) != 3:
        yield f"crop-flip needs images, and the examples have shape {data.train.shape}: use 'none'.", None
    if local.jacobian and (reason := _why_no_jacobian(program)):
        yield f"the Jacobian correction {reason}. Leave the correction out.", None
    yield from algorithm_problems(session.algorithm, program.start(program.shared))
    sample = _sample(program, task, data) if len(data.train) else None
    classes = _classes(task, sample)
    if len(data.train):
        if (error := _failure(program, task, data, local, 1)) is not None:
            yield from _training_problems(program, task, data, local, sample, error)
        yield from _loss_problems(task, sample)
        yield from _distill_problems(session.algorithm, sample)
        yield from _class_problems(classes, data)
    if personal and not data.has_personal:
        yield (
            "personal=True scores each client's own model, and no client has test data: give the clients test data, or "
            "leave personal out.",
            None,
        )
    if task.test is not None and not program.local:
        yield from _test_set_problems(program, task, classes, "the test data", task.test)
    if personal and data.personal is not None:
        yield from _test_set_problems(program, task, classes, "the clients' test data", data.personal[0])
    if settings.target is not None and task.primary in FRACTIONS and not 0 < settings.target <= 1:
        yield (
            f"target is {settings.target}: expected a number above 0 and at most 1 for {task.primary}.",
            None,
        )
    goals = {"target": settings.target, "patience": settings.patience}
    asked = [f"a {name} of {value}" for name, value in goals.items() if value is not None]
    if asked and not personal and (program.local or task.test is None):
        yield (
            f"{asked[0]} needs test data to be measured on: give the Task a test set, or the "
            "clients test data where parts of the model are private.",
            None,
        )


def _why_no_jacobian(program: Program) -> str:
    """Why the correction cannot be computed, or ""."""
    if not program.forms:
        return "needs factorized weights, and this model has none"
    if fixed := program.half_frozen or next(iter(program.fixed), ""):
        return f"steps all factors of a weight, and some of {fixed} are frozen"
    if over := covered(program.model):
        return f"steps the factors of a weight, and {over} has another parametrization on top of them"
    return ""


def _training_problems(
    program: Program,
    task: Task,
    data: FederatedData,
    local: Local,
    sample: Sample | None,
    error: Exception,
) -> Iterator[Problem]:
    """Problems of a model that cannot train on one example: it may still train on two."""
    message = in_a_line(error).rstrip(".")
    if _failure(program, task, data, local, 2) is not None:
        if task.loss != "cross-entropy":
            yield from _loss_problems(task, sample)
        advice = _type_advice(program, task, data) if "type" in message else ""
        yield f"the model cannot train on {_kind(_one_batch(data, 1))}: {message}.{advice}", error
    elif (
        data.sizes_known and smallest_batch(data, local) == 1
    ):  # slow for many clients, so only computed if needed
        yield (
            f"the model cannot train on a batch of one example, and some client has such a batch ({message}). Choose "
            "another batch size, or a model without BatchNorm.",
            error,
        )


def _sample(program: Program, task: Task, data: FederatedData) -> Sample | None:
    """Two examples and the model's outputs for them; None if the model fails itself, which is reported elsewhere."""
    worker, some = Worker(program, task), _one_batch(data, 2)
    worker.model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return some, worker.output(some.inputs)
        except Exception:
            return None


def _loss_problems(task: Task, sample: Sample | None) -> Iterator[Problem]:
    """Calls the loss and the metrics once."""
    if sample is None:
        return
    some, output = sample
    for name, metric in task.scored.items():
        called = f" {task.loss!r}" if isinstance(task.loss, str) else ""
        what = f"the loss{called}" if name == LOSS else f"metric {name!r}"
        try:
            made = metric.of(output, some.targets)
        except Exception as error:
            yield f"{what} failed{_taken(task, name, output, some)}: {in_a_line(error).rstrip('.')}.", error
            continue
        if problem := problem_of(made, 2, what):
            yield problem, None
        elif name == LOSS and not math.isfinite(float(mean_loss(made))):
            yield f"the loss of the first example is {float(mean_loss(made))}, before any training.", None


def _distill_problems(a: Algorithm, sample: Sample | None) -> Iterator[Problem]:
    """Calls `distill` once."""
    if a.distill is None or sample is None:
        return
    some, output = sample
    what = f"algorithm {a.name!r}: distill"
    try:
        made = a.distill(output, some.targets, output)
    except Exception as error:
        called = "It is called as distill(output, targets, received)."
        yield f"{what} failed: {in_a_line(error).rstrip('.')}. {called}", error
        return
    if problem := problem_of(made, 2, what):
        yield problem, None


def _class_problems(classes: int | None, data: FederatedData) -> Iterator[Problem]:
    """A target that is no class ends a run on a GPU, and the process with it."""
    if classes is None:
        return
    try:
        data.expect_classes(classes, IGNORED)
    except DataError as error:
        yield str(error), None


def _classes(task: Task, sample: Sample | None) -> int | None:
    """How many classes the model tells apart, if the loss takes classes."""
    if task.loss not in CLASSES or sample is None:
        return None
    shape, place = getattr(sample[1], "shape", ()), CLASSES[str(task.loss)]
    return int(shape[place]) if len(shape) > 1 else None


def _taken(task: Task, name: str, output: Any, some: Examples) -> str:
    """What a loss or metric of the library was given, and what it takes."""
    called = task.loss if name == LOSS else name
    known: Mapping[str, Any] = losses.LOSSES if name == LOSS else metrics.METRICS
    if not isinstance(called, str) or (name != LOSS and task.scored[name] is not known.get(name)):
        return ""
    takes = (losses if name == LOSS else metrics).TAKES[called]
    given = f"output {describe(output)} and targets {describe(some.targets)}"
    return f" on {given}, where it takes {takes}"


def _test_set_problems(
    program: Program, task: Task, classes: int | None, what: str, test: Examples
) -> Iterator[Problem]:
    if not len(test):
        yield f"{what} hold no example: give some, or None.", None
    try:
        Worker(program, task).evaluate(program.initial, test.subset([_telling(test)]))
    except Exception as error:
        yield f"the model cannot be scored on {what}, {_kind(test)}: {in_a_line(error).rstrip('.')}.", error
    if classes is not None and (wrong := test.no_class(classes, IGNORED)) is not None:
        yield f"{what} have the target {wrong[1]}: {of_classes(classes, IGNORED)}", None


def _telling(examples: Examples) -> int:
    """The example with the largest class: a model with too few outputs fails on it."""
    return 0 if examples.classes is None else int(examples.targets.argmax())


def _kind(examples: Examples) -> str:
    one = examples.part(slice(1))
    if examples.classes is None or not examples.shape:
        return f"{describe(one.inputs)} with targets {describe(one.targets)}"
    largest = int(examples.targets.max())
    return f"{one.inputs.dtype} examples of shape {examples.shape} with labels up to {largest}"


def _type_advice(program: Program, task: Task, data: FederatedData) -> str:
    """Advice on the type mistakes that torch's own message does not explain."""
    targets = data.train.targets
    if task.loss == "cross-entropy" and isinstance(targets, Tensor) and targets.is_floating_point():
        return (
            " Classes are integers: convert the targets with .long(), or choose another loss, such as 'mse'."
        )
    if not isinstance(data.train.inputs, Tensor):
        return ""
    read = _one_batch(data, 1).inputs.dtype
    held = {t.dtype for t in program.start(program.parameters).values() if t.is_floating_point()}
    if data.train.inputs.dtype == torch.uint8 and data.train.mean is None:
        return " Bytes without a mean and std are read as indices: if these are images, give Examples both."
    if read.is_floating_point and held and held != {read}:
        types = ", ".join(sorted(map(str, held)))
        return f" The model holds {types}: convert one of the two, for example with .float()."
    return ""


def smallest_batch(data: FederatedData, local: Local) -> int:
    """The size of the smallest batch in any client's round; 0 if no client has an example."""
    held = (int(n) for n in np.unique(data.sizes) if n)
    return min((_smallest_of(n, local) for n in held), default=0)


def _smallest_of(examples: int, local: Local) -> int:
    short = examples % local.batch_size
    comes_up = short and local.steps_for(examples) > examples // local.batch_size
    return short if comes_up else min(examples, local.batch_size)


def _failure(program: Program, task: Task, data: FederatedData, local: Local, size: int) -> Exception | None:
    worker, some = Worker(program, task), _one_batch(data, size)
    try:
        with torch.random.fork_rng(devices=[]):
            worker.gradient(some.inputs, some.targets, local, local.lr)
    except Exception as error:
        return error
    return _changed_constant(program, worker)


def _changed_constant(program: Program, worker: Worker) -> Exception | None:
    """An error if a step changed a tensor that counts as frozen: the change would be lost."""
    named = named_tensors(worker.model)
    for name in program.frozen:
        if not torch.equal(named[name], program.initial[name]):
            advice = f"assign it in a method of its module (self.{name.rpartition('.')[2]} = ...)"
            return ConfigError(
                f"a step changes {name}, which the code of the model's modules does not show: {advice}"
            )
    return None


def _one_batch(data: FederatedData, size: int) -> Examples:
    """A batch of `size` copies of one example, normalised as in training."""
    some = data.train.subset([_telling(data.train)] * size)
    return replace(some, inputs=some.normalised(), mean=None, std=None)
