"""RoundPlan: the plan of a batched round: which client trains in which lane, on which examples in each step.

index[lane, step, b]      an example of the training set; padding repeats one of the same client, or is 0
sizes[lane, step]         the number of examples in the batch; 0 once the lane is done
seeds[lane, step]         the seed of the step's dropout
rates[lane, step]         the learning rate
crops[lane, step, :, b]   how the image is cropped and mirrored, with augmentation
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpara.data import FederatedData
from fedpara.engines.batched import packing
from fedpara.engines.batched.packing import Segment
from fedpara.engines.local.augment import draw
from fedpara.engines.local.batches import batches
from fedpara.engines.local.dropout import step_seed
from fedpara.engines.rng import cohort, numpy_rng, torch_seed
from fedpara.engines.session import Session
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

    lanes: int
    steps: int  # of the longest lane
    width: int  # of the largest batch


def typical_shape(session: Session, data: FederatedData, size: int, lanes: int | None = None) -> LaneShape:
    """The shape for `lanes`, by default the largest number of lanes that wastes little, at most one per client."""
    local = session.algorithm.local.of
    drawn = [cohort(session.seed, t, len(data), size) for t in range(1, TYPICAL_COHORTS + 1)]
    if not data.sizes_known:
        drawn = drawn[:1]  # each size means reading that client's data
    steps = [[local(client).steps_for(data.size(client)) for client in clients] for clients in drawn]
    lanes = lanes or packing.choose(steps, size)
    longest = max(packing.length(packing.pack(row, lanes)) for row in steps)
    chosen = {client for clients in drawn for client in clients}
    widths = [min(local(client).batch_size, data.size(client)) for client in chosen]
    if data.sizes_known and session.algorithm.local.per_client is None:
        widths.append(min(session.algorithm.local.batch_size, int(data.sizes.max())))
    return LaneShape(lanes, longest, max(widths))
