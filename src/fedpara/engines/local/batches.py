"""Which examples a client sees in each step, the same in every engine."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedpara.algorithms import Local


def batches(examples: int, local: Local, generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """One permutation per epoch, split into batches; a short last batch is used too.

    With `steps` instead of epochs, epochs repeat until that many steps are done.
    """
    left = local.steps_for(examples)
    while left > 0:
        order = generator.permutation(examples)
        for start in range(0, examples, local.batch_size):
            yield order[start : start + local.batch_size]
            left -= 1
            if left == 0:
                return
