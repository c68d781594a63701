"""Checks a run before its first round, so that a mistake costs no training time.

The algorithm's functions are called once, one gradient is computed on one example (or two, where one is too few), and
one example of each test set is scored.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedpara.algorithms import Algorithm, Local
from fedpara.algorithms.core import expect_like, expect_variables
from fedpara.data import Examples, FederatedData, normalise
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import Program, named_tensors
from fedpara.engines.session import PRIVATE, Session
from fedpara.engines.settings import Settings
from fedpara.engines.task import Task
from fedpara.errors import ConfigError, in_a_line
from fedpara.parameterization import covered
from fedpara.state import State, zeros_like

Problem = tuple[str, Exception | None]
"""A sentence for the user, and the error that it explains."""


def check_run(session: Session, task: Task, data: FederatedData, settings: Settings, personal: bool) -> None:
    """ConfigError for a run that cannot work, with the first problem found."""
    for text, cause in _problems(session, task, data, settings, personal):
        raise ConfigError(text) from cause


def _problems(
    session: Session, task: Task, data: FederatedData, settings: Settings, personal: bool
) -> Iterator[Problem]:
    program, local = session.program, session.algorithm.local
    if settings.cohort > len(data):
        yield f"a cohort of {settings.cohort} from {len(data)} clients: choose a smaller cohort.", None
    if task.augment == "crop-flip" and len(data.train.shape) != 3:
        yield f"crop-flip needs images, and the examples have shape {data.train.shape}: use 'none'.", None
    if local.jacobian and (reason := _why_no_jacobian(program)):
        yield f"the Jacobian correction {reason}. Leave the correction out.", None
    yield from _algorithm_problems(session.algorithm, program.start(program.shared))
    if len(data.train) and (error := _failure(program, data, local, 1)) is not None:
        yield from _training_problems(program, data, local, error)
    if personal and not data.has_personal:
        yield "personal=True scores each client's own model, and no client has test data.", None
    if task.test is not None and not program.private:
        yield from _test_set_problems(program, "the test data", task.test)
    if personal and data.personal is not None:
        yield from _test_set_problems(program, "the clients' test data", data.personal[0])
    if settings.target is not None and not personal and (program.private or task.test is None):
        yield (
            f"a target of {settings.target} needs test data to be measured on: give the Task a test set, or the "
            "clients test data where parts of the model are private.",
            None,
        )


def _why_no_jacobian(program: Program) -> str:
    """Why the correction cannot be computed, or ""."""
    if not program.forms:
        return "needs factorized weights, and this model has none"
    if program.half_frozen:
        return f"steps all factors of a weight, and some of {program.half_frozen} are frozen"
    if over := covered(program.model):
        return f"steps the factors of a weight, and {over} has another parametrization on top of them"
    return ""


def _algorithm_problems(a: Algorithm, x: State) -> Iterator[Problem]:
    """Calls every function of the algorithm once, except `aggregate`."""
    server = expect_variables(a.name, "server_init", a.server_init(x))
    broadcast = expect_variables(a.name, "broadcast", a.broadcast(server))
    first = expect_variables(a.name, "client_init", a.client_init(x))
    expect_like(a.name, "correct", a.correct(zeros_like(x), x, x, broadcast, first), x)
    expect_like(a.name, "send", a.send(x, x, 1), x)
    made: Any = a.finish(x, x, broadcast, first, 1, 1.0)
    if not (isinstance(made, tuple) and len(made) == 2):
        what = "expected a pair of dicts, what the client sends and its new variables."
        yield f"algorithm {a.name!r}: finish returned {type(made).__name__}: {what}", None
    extra, own = (expect_variables(a.name, "finish", part) for part in made)
    if taken := {PRIVATE, ""} & {*first, *own, *broadcast, *extra}:
        yield f"algorithm {a.name!r} names a variable {taken.pop()!r}, which is reserved: rename it.", None
    if any(state.keys() != first.get(name, {}).keys() for name, state in own.items()):
        what = "client variables with other names than client_init: expected the same names."
        yield f"algorithm {a.name!r}: finish returns {what}", None


def _training_problems(
    program: Program, data: FederatedData, local: Local, error: Exception
) -> Iterator[Problem]:
    """Problems of a model that cannot train on one example: it may still train on two."""
    message = in_a_line(error).rstrip(".")
    if _failure(program, data, local, 2) is not None:
        advice = _type_advice(program, data) if "type" in message else ""
        yield (
            f"the model cannot train on {_one_batch(data, 1).inputs.dtype} examples of shape {data.train.shape} with "
            f"labels up to {int(data.train.labels.max())}: {message}.{advice}",
            error,
        )
    elif smallest_batch(data, local) == 1:  # slow for many clients, so only computed if needed
        yield (
            f"the model cannot train on a batch of one example, and some client has such a batch ({message}). Choose "
            "another batch size, or a model without BatchNorm.",
            error,
        )


def _test_set_problems(program: Program, what: str, test: Examples) -> Iterator[Problem]:
    if not len(test):
        yield f"{what} hold no example: give some, or None.", None
    some = test.subset([int(test.labels.argmax())])
    try:
        Worker(program).evaluate(program.initial, some)
    except Exception as error:
        kind = f"{test.inputs.dtype} of shape {test.shape} with labels up to {int(test.labels.max())}"
        yield f"the model cannot be scored on {what}, {kind}: {in_a_line(error).rstrip('.')}.", error


def _type_advice(program: Program, data: FederatedData) -> str:
    """Advice on the two type mistakes that torch's own message does not explain."""
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


def _failure(program: Program, data: FederatedData, local: Local, size: int) -> Exception | None:
    worker, some = Worker(program), _one_batch(data, size)
    try:
        with torch.random.fork_rng(devices=[]):
            worker.gradient(some.inputs, some.labels, local, local.lr)
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
    """A batch as a step reads it, with the largest label: a model with too few outputs fails on that label."""
    some = data.train.subset([int(data.train.labels.argmax())] * size)
    return replace(some, inputs=normalise(some.inputs, some.mean, some.std))
