"""Which examples a client sees in which step, the same for every engine."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedpara.algorithms import Local


def batches(examples: int, local: Local, generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Epochs of a fresh permutation each, cut into batches; a short last batch is kept.

    With `steps` in place of epochs the epochs go on until the steps are done.
    """
    left = local.steps_for(examples)
    while left > 0:
        order = generator.permutation(examples)
        for start in range(0, examples, local.batch_size):
            yield order[start : start + local.batch_size]
            left -= 1
            if left == 0:
                return
