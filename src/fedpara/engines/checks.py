"""Trial: one gradient of one example, or of two where one is too few, before anything is run or written.

And one score of one example of each set that the model will be scored on.
"""

from dataclasses import replace

import numpy as np
import torch

from fedpara.algorithms import Local
from fedpara.data import Examples, FederatedData, normalise
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import Program
from fedpara.errors import ConfigError, in_a_line


def refuse_untrainable(program: Program, data: FederatedData, local: Local) -> None:
    """ConfigError for a model that these examples cannot train, in these batches."""
    if not len(data.train) or (error := _failure(program, data, local, 1)) is None:
        return
    said = in_a_line(error).rstrip(".")
    if _failure(program, data, local, 2) is None:
        if smallest_batch(data, local) != 1:  # asks each client for its size, so only where it matters
            return
        raise ConfigError(
            f"the model cannot be trained on a batch of one example, and some batch here holds but one ({said}). "
            "Choose another batch size, or a model without BatchNorm."
        ) from error
    raise ConfigError(
        f"the model cannot be trained on {_read(data, 1).inputs.dtype} examples of shape {data.train.shape} with "
        f"labels up to {int(data.train.labels.max())}: {said}.{_cure(program, data) if 'type' in said else ''}"
    ) from error


def refuse_unscorable(program: Program, what: str, test: Examples) -> None:
    """ConfigError for a set that the model cannot be scored on: a round of training would be lost."""
    if not len(test):
        return
    some = test.subset([int(test.labels.argmax())])
    try:
        Worker(program).evaluate(program.initial, some)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be scored on {what}, {test.inputs.dtype} of shape {test.shape} with labels up to "
            f"{int(test.labels.max())}: {in_a_line(error).rstrip('.')}."
        ) from error


def _cure(program: Program, data: FederatedData) -> str:
    """For the two mistakes of types that torch's own words do not explain."""
    read = _read(data, 1).inputs.dtype
    held = {t.dtype for t in program.start(program.parameters).values() if t.is_floating_point()}
    if data.train.inputs.dtype == torch.uint8 and data.train.mean is None:
        return " Bytes are taken for indices unless they have a mean and std: if these are images, give Examples both."
    if read.is_floating_point and held and held != {read}:
        types = ", ".join(sorted(map(str, held)))
        return f" The model holds {types}: make both of one type, as .float() does."
    return ""


def smallest_batch(data: FederatedData, local: Local) -> int:
    """0 where no client holds an example."""
    held = (int(n) for n in np.unique(data.sizes) if n)
    return min((_smallest_of(n, local) for n in held), default=0)


def _smallest_of(examples: int, local: Local) -> int:
    short = examples % local.batch_size
    comes_up = short and local.steps_for(examples) > examples // local.batch_size
    return short if comes_up else min(examples, local.batch_size)


def _failure(program: Program, data: FederatedData, local: Local, size: int) -> Exception | None:
    worker, some = Worker(program), _read(data, size)
    try:
        with torch.random.fork_rng(devices=[]):
            worker.gradient(some.inputs, some.labels, local, local.lr)
    except Exception as error:
        return error
    return None


def _read(data: FederatedData, size: int) -> Examples:
    """A batch as a step reads it, of the label that an output too small misses."""
    some = data.train.subset([int(data.train.labels.argmax())] * size)
    return replace(some, inputs=normalise(some.inputs, some.mean, some.std))
