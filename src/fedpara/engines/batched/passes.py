"""LanePass: one training of a cohort's clients in the lanes, and what it keeps on the device between rounds.

A round has one pass for the server's model and, if the algorithm has personal models, a second one for these. Each has
its own lane state and captured steps, because their optimizers and their numbers of steps may differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedpara.algorithms import Variables
from fedpara.engines.batched.examples import CohortExamples
from fedpara.engines.batched.lane_state import LaneState, allocate_lanes
from fedpara.engines.batched.round_plan import LaneShape, RoundPlan
from fedpara.engines.client import own_variables
from fedpara.engines.memory import CohortMemories
from fedpara.engines.session import PRIVATE, Session, memory_of
from fedpara.engines.transfer import move, move_variables, stack_on
from fedpara.state import State, device_of


@dataclass(eq=False)
class LanePass:
    session: Session  # with the algorithm of this training
    training: int  # its position in `Session.trainings`
    lane_state: LaneState | None = None
    ticks: dict[bool, Callable[[], None]] = field(default_factory=dict)  # by whether batches are masked

    def forget(self) -> None:
        """Drops the lane state and the captured steps, because the number of lanes changes."""
        self.lane_state, self.ticks = None, {}

    def prepare(
        self,
        plan: RoundPlan,
        start: State,
        memory: Variables,
        down: Variables,
        shape: LaneShape,
        examples: CohortExamples,
    ) -> LaneState:
        """The lane state, allocated once and refilled each round; a longer or wider plan needs a new one.

        `start` is the server's model on the device, `memory` some client's.
        """
        device, lane_state = examples.device, self.lane_state
        if (
            lane_state is None
            or plan.steps > lane_state.feed.plan.shape[1]
            or plan.width > lane_state.feed.plan.shape[2]
            or (device.type != "cpu" and len(examples.current) > lane_state.feed.room)
        ):
            own = memory_of(memory, self.training)
            self.ticks = {}
            self.lane_state = lane_state = allocate_lanes(
                self.session,
                {**start, **move(own[PRIVATE], device)},
                down,
                move_variables(own_variables(own), device),
                (shape.lanes, max(plan.steps, shape.steps), max(plan.width, shape.width)),
                plan.crops is not None,
                examples.allocate(),
            )
        x = {name: start[name] for name in self.session.program.shared}
        beside = {name: start[name] for name in self.session.beside}
        lane_state.fill(plan, x, move_variables(down, device), beside)
        examples.put_into(lane_state)
        return lane_state

    def owned(
        self, memories: CohortMemories, clients: Sequence[int], lane_state: LaneState
    ) -> list[Variables]:
        """The clients' own tensors for their lanes, on the device."""
        if memories.are_empty:
            return [{PRIVATE: {}}] * len(clients)
        parts, device = [memory_of(m, self.training) for m in memories.of(clients)], lane_state.losses.device
        if device_of(state for part in parts for state in part.values()).type == device.type:
            return parts
        stacked = {name: stack_on([part[name] for part in parts], device) for name in parts[0]}
        return [
            {variable: {name: t[i] for name, t in state.items()} for variable, state in stacked.items()}
            for i in range(len(parts))
        ]
