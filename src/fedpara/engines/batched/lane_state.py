"""LaneState: the tensors that a captured step reads and writes; their addresses stay the same in every round."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpara.algorithms import Variables
from fedpara.algorithms.optimizers import Slots, build_optimizer
from fedpara.data import Examples
from fedpara.engines.batched.feed import Feed, all_tensors, allocate_feed, with_tensors
from fedpara.engines.batched.round_plan import RoundPlan
from fedpara.engines.session import PRIVATE, SLOT, Session
from fedpara.state import State

Lanes = Tensor | slice


@dataclass
class LaneState:
    """`own` and `slots` are stacked like the parameters; all lanes share `x`, `down` and `beside`."""

    parameters: State
    slots: Slots  # the optimizer's
    buffers: State
    own: Variables
    x: State
    down: Variables
    beside: State  # what composed weights read beside the parameters (`Session.beside`)
    entered: State  # the received values of `Session.entered`, stacked
    losses: Tensor  # [lane], summed since the client entered
    first_slots: Slots  # for a client without stored slots
    scale: Tensor | None  # [2, channel, 1, 1]: mean and deviation, if the inputs are bytes
    feed: Feed

    def tensors(self) -> list[Tensor]:
        """All tensors except the feed's."""
        return all_tensors(self._states())

    def holding(self, tensors: Sequence[Tensor]) -> "LaneState":
        """The same structure with other tensors, in the order of `tensors()`."""
        return replace(self, **with_tensors(self._states(), tensors))

    def _states(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "feed"}

    def fill(self, plan: RoundPlan, x: State, down: Variables, beside: State) -> None:
        """Copies in a round's plan, and the tensors that all its clients receive."""
        self.feed.fill(plan)
        for name, tensor in x.items():
            self.x[name].copy_(tensor)
        for name, tensor in beside.items():
            self.beside[name].copy_(tensor)
        for variable, state in down.items():
            for name, tensor in state.items():
                self.down[variable][name].copy_(tensor)

    def enter(self, lanes: Lanes, start: State, memories: Sequence[Variables]) -> None:
        """Clients enter these lanes with the model they received and their own private part and variables."""
        variables = dict(memories[0])
        private = variables.pop(PRIVATE)

        def put(room: Tensor, variable: str, name: str) -> None:
            theirs = [memory[variable][name] for memory in memories]
            if isinstance(lanes, slice):
                torch.stack(theirs, out=room[lanes])
            else:
                room[lanes] = torch.stack(theirs)

        for tensors in (self.parameters, self.buffers):
            for name, tensor in tensors.items():
                if name in private:
                    put(tensor, PRIVATE, name)
                else:
                    tensor[lanes] = start[name]
                if name in self.entered:
                    self.entered[name][lanes] = tensor[lanes]
        kept = {name for name in variables if name.startswith(SLOT)}
        for slot, state in self.slots.items():
            if SLOT + slot not in kept:
                for name, tensor in state.items():
                    tensor[lanes] = self.first_slots[slot][name]
        for variable, state in variables.items():
            room = self.slots[variable.removeprefix(SLOT)] if variable in kept else self.own[variable]
            for name in state:
                put(room[name], variable, name)
        self.losses[lanes] = 0.0

    def leave(self, lanes: Lanes, with_slots: bool, last: bool) -> tuple[State, Tensor]:
        """(the trained states of the clients in these lanes, stacked; their losses)

        Slots have names such as "optimizer.m/weight". Only the `last` clients of a round may leave as views.
        """

        def taken(tensor: Tensor) -> Tensor:
            if isinstance(lanes, Tensor):
                return tensor.index_select(0, lanes)
            return tensor[lanes] if last else tensor[lanes].clone()

        slots = {
            f"{SLOT}{slot}/{name}": tensor
            for slot, state in self.slots.items()
            for name, tensor in state.items()
        }
        whole = {**self.parameters, **self.buffers, **(slots if with_slots else {})}
        return {name: taken(tensor) for name, tensor in whole.items()}, taken(self.losses)


def lanes_of(numbers: Sequence[int], device: torch.device) -> Lanes:
    """A slice if the numbers follow one another, otherwise an index on the device."""
    if numbers and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def slots_of(state: State) -> Slots:
    """The optimizer's slots in a state that left a lane."""
    found: Slots = {}
    for name, tensor in state.items():
        slot, slash, of = name.partition("/")
        if slash and slot.startswith(SLOT):
            found.setdefault(slot.removeprefix(SLOT), {})[of] = tensor
    return found


def allocate_lanes(
    session: Session,
    whole: State,
    down: Variables,
    own: Variables,
    shape: tuple[int, int, int],
    crops: bool,
    examples: Examples,
) -> LaneState:
    """A LaneState of `shape` = (lanes, steps, batch) for clients like the one given, on the examples' device."""
    program, lanes, device = session.program, shape[0], examples.device

    def room(state: State) -> State:
        return {name: tensor.expand(lanes, *tensor.shape).clone() for name, tensor in state.items()}

    trained = {name: whole[name] for name in program.parameters}
    first_slots = build_optimizer(session.algorithm.local).init(trained)
    exact = any(tensor.dtype == torch.float64 for tensor in trained.values())
    dtype = torch.float64 if exact else torch.float32
    return LaneState(
        parameters=room(trained),
        slots={slot: room(state) for slot, state in first_slots.items()},
        first_slots=first_slots,
        buffers=room({name: whole[name] for name in program.buffers}),
        own={variable: room(state) for variable, state in own.items() if not variable.startswith(SLOT)},
        x={name: whole[name].clone() for name in program.shared},
        down={v: {n: t.to(device, copy=True) for n, t in s.items()} for v, s in down.items()},
        beside={name: whole[name].clone() for name in session.beside},
        entered=room({name: whole[name] for name in session.entered}),
        losses=torch.zeros(lanes, dtype=dtype, device=device),
        scale=_per_channel(examples),
        feed=allocate_feed(shape, crops, examples, dtype),
    )


def _per_channel(examples: Examples) -> Tensor | None:
    """Mean and deviation as a tensor on the device, because a captured graph cannot read them from the host."""
    if examples.mean is None or examples.std is None:
        return None
    both = torch.tensor([examples.mean, examples.std], device=examples.device)
    return both[:, :, None, None]
