"""RoundPlan: the plan of a batched round: which client trains in which lane, on which examples in each step.

index[lane, step, b]      an example of the training set; padding repeats one of the same client, or is 0
sizes[lane, step]         the number of examples in the batch; 0 once the lane is done
seeds[lane, step]         the seed of the step's dropout
rates[lane, step]         the learning rate
crops[lane, step, :, b]   how the image is cropped and mirrored, with augmentation
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpara.data import FederatedData
from fedpara.engines.batched import packing
from fedpara.engines.batched.packing import Segment
from fedpara.engines.local.augment import draw
from fedpara.engines.local.batches import batches
from fedpara.engines.local.dropout import step_seed
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.rng import numpy_rng, torch_seed
from fedpara.engines.session import Session
from fedpara.errors import ConfigError
from fedpara.tasks import Augment

TYPICAL_COHORTS = 20


@dataclass(frozen=True, eq=False)
class RoundPlan:
    segments: list[Segment]
    index: NDArray[np.int64]
    sizes: NDArray[np.int64]
    seeds: NDArray[np.int64]
    rates: NDArray[np.float64]
    crops: NDArray[np.uint8] | None

    def __repr__(self) -> str:
        lanes = self.index.shape[0]
        return f"RoundPlan({len(self.segments)} clients in {lanes} lanes, {self.steps} steps, batches of {self.width})"

    @property
    def steps(self) -> int:
        return int(self.index.shape[1])

    @property
    def width(self) -> int:
        return int(self.index.shape[2])


def plan_round(
    session: Session,
    held: Sequence[NDArray[np.int64]],
    augment: Augment,
    round: int,
    clients: Sequence[int],
    lanes: int,
) -> RoundPlan:
    """`held` are each client's rows of the training set."""
    locals_ = [session.algorithm.local.of(client) for client in clients]
    segments = packing.pack([lo.steps_for(len(rows)) for lo, rows in zip(locals_, held, strict=True)], lanes)
    width = max(min(lo.batch_size, len(rows)) for lo, rows in zip(locals_, held, strict=True))
    index = np.zeros((lanes, packing.length(segments), width), np.int64)
    sizes, seeds = np.zeros(index.shape[:2], np.int64), np.zeros(index.shape[:2], np.int64)
    rates = np.zeros(index.shape[:2])
    crops = np.zeros((*index.shape[:2], 3, width), np.uint8) if augment == "crop-flip" else None
    for segment in segments:
        client, examples, local = clients[segment.client], held[segment.client], locals_[segment.client]
        rates[segment.lane, segment.start : segment.end] = local.rates(round, segment.steps)
        order = numpy_rng(session.seed, "batches", round, client)
        stream = torch_seed(session.seed, "layers", round, client)
        windows = numpy_rng(session.seed, "augment", round, client) if crops is not None else None
        for i, batch in enumerate(batches(len(examples), local, order), segment.start):
            index[segment.lane, i] = examples[batch[0]]
            index[segment.lane, i, : len(batch)] = examples[batch]
            sizes[segment.lane, i] = len(batch)
            seeds[segment.lane, i] = step_seed(stream, i - segment.start)
            if crops is not None and windows is not None:
                crops[segment.lane, i, :, : len(batch)] = draw(len(batch), windows)
    return RoundPlan(segments, index, sizes, seeds, rates, crops)


@dataclass(frozen=True)
class LaneShape:
    """The lanes, steps and batch that typical cohorts of a federation need, so that the lane state seldom grows."""

    clients: int  # of the largest cohort
    lanes: int
    steps: int  # of the longest lane
    width: int  # of the largest batch


def _first_cohorts(cohorts: Cohorts, count: int) -> list[list[int]]:
    """At most `count`: a sampler that knows the run's rounds only may fail after the last one."""
    drawn = [cohorts.draw(1)]
    with suppress(ConfigError):
        for round in range(2, count + 1):
            drawn.append(cohorts.draw(round))
    return drawn


def typical_shape(
    session: Session, data: FederatedData, cohorts: Cohorts, lanes: int | None = None
) -> LaneShape:
    """The shape for `lanes`, by default the largest number of lanes that wastes little, at most one per client.

    If cohorts vary in size, waste is measured on as many clients as `cohorts.size`: idle lanes in a small cohort cost
    less than a second pass over the lanes in a large one. The lanes then grow in proportion to the largest cohort.
    """
    local, size = session.algorithm.local.of, cohorts.size
    # Without known sizes, each size means reading that client's data.
    drawn = _first_cohorts(cohorts, TYPICAL_COHORTS if data.sizes_known else 1)
    largest = max(map(len, drawn))
    steps = [[local(client).steps_for(data.size(client)) for client in clients] for clients in drawn]
    if not lanes:
        every = [n for row in steps for n in row]
        even = [every[i : i + size] for i in range(0, max(1, len(every) - size + 1), size)]
        lanes = max(1, packing.choose(even, size) * largest // size)
    longest = max(packing.length(packing.pack(row, lanes)) for row in steps)
    chosen = {client for clients in drawn for client in clients}
    widths = [min(local(client).batch_size, data.size(client)) for client in chosen]
    if data.sizes_known and session.algorithm.local.per_client is None:
        widths.append(min(session.algorithm.local.batch_size, int(data.sizes.max())))
    return LaneShape(largest, lanes, longest, max(widths, default=1))
