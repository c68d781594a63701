"""LaneState: the tensors that a captured step reads and writes; their addresses stay the same in every round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpara.algorithms import Variables
from fedpara.algorithms.optimizers import Slots, build_optimizer
from fedpara.data import Examples
from fedpara.engines.batched.round_plan import RoundPlan
from fedpara.engines.session import SLOT, Session
from fedpara.state import State
from fedpara.trees import Tree, leaves, map_tree


@dataclass
class LaneState:
    """`own` and `slots` are stacked like the parameters; all lanes share `x`, `down`, `beside` and the examples."""

    parameters: State
    slots: Slots  # the optimizer's
    buffers: State
    own: Variables
    x: State
    down: Variables
    beside: State  # what composed weights read beside the parameters (`Session.beside`)
    plan: Tensor  # int64 [lane, step, batch]
    sizes: Tensor  # int64 [lane, step]: examples in that step's batch, 0 once the lane is done
    seeds: Tensor  # int64 [lane, step]
    rates: Tensor  # [lane, step]: learning rates
    counter: Tensor  # int64 [1]
    losses: Tensor  # [lane], summed since the client entered
    crops: Tensor | None  # uint8 [lane, step, 3, batch], with crop-flip augmentation
    inputs: Tree
    targets: Tree
    first_slots: Slots  # of a client that enters a lane without kept ones
    scale: Tensor | None  # [2, channel, 1, 1]: mean and deviation, if the inputs are bytes

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        _each(found.append, vars(self))
        return found

    def holding(self, tensors: Sequence[Tensor]) -> "LaneState":
        """The same structure with other tensors, in the order of `tensors()`."""
        given = iter(tensors)
        return LaneState(**_each(lambda _: next(given), vars(self)))

    def fill(self, plan: RoundPlan, x: State, down: Variables, beside: State) -> None:
        """Copies in a round's plan, and the tensors that all its clients receive."""
        steps, width = plan.steps, plan.width
        self.plan[:, :steps, :width].copy_(torch.from_numpy(plan.index))
        self.sizes.zero_()
        self.sizes[:, :steps].copy_(torch.from_numpy(plan.sizes))
        self.seeds[:, :steps].copy_(torch.from_numpy(plan.seeds))
        self.rates[:, :steps].copy_(torch.from_numpy(plan.rates))
        if self.crops is not None and plan.crops is not None:
            self.crops[:, :steps, :, :width].copy_(torch.from_numpy(plan.crops))
        for name, tensor in x.items():
            self.x[name].copy_(tensor)
        for name, tensor in beside.items():
            self.beside[name].copy_(tensor)
        for variable, state in down.items():
            for name, tensor in state.items():
                self.down[variable][name].copy_(tensor)

    @property
    def room(self) -> int:
        """How many examples there is room for."""
        return len(leaves(self.inputs)[0])

    def hold(self, examples: Examples) -> None:
        """Takes a cohort's examples: by a copy on a GPU, where addresses must stay."""
        if examples.device == self.counter.device:
            self.inputs, self.targets = examples.inputs, examples.targets
            return
        for room, held in ((self.inputs, examples.inputs), (self.targets, examples.targets)):
            map_tree(lambda there, here: there[: len(here)].copy_(here), room, held)

    def release(self, examples: Examples) -> None:
        """Drops the last cohort's examples on a CPU, for a few others, before the next ones are read."""
        if examples.device == self.counter.device:
            self.hold(examples)

    def enter(
        self, lanes: Tensor, start: State, clients: Tensor, private: State, variables: Variables
    ) -> None:
        """Clients enter these lanes with the model they received and their own private part and variables."""
        for tensors in (self.parameters, self.buffers):
            for name, tensor in tensors.items():
                tensor[lanes] = private[name].index_select(0, clients) if name in private else start[name]
        kept = {name for name in variables if name.startswith(SLOT)}
        for slot, state in self.slots.items():
            if SLOT + slot not in kept:
                for name, tensor in state.items():
                    tensor[lanes] = self.first_slots[slot][name]
        for variable, state in variables.items():
            room = self.slots[variable.removeprefix(SLOT)] if variable in kept else self.own[variable]
            for name, tensor in state.items():
                room[name][lanes] = tensor.index_select(0, clients)
        self.losses[lanes] = 0.0

    def leave(self, lanes: Tensor, with_slots: bool) -> State:
        """The trained states of the clients in these lanes, stacked. Slots have names such as "optimizer.m/weight"."""
        slots = {
            f"{SLOT}{slot}/{name}": tensor
            for slot, state in self.slots.items()
            for name, tensor in state.items()
        }
        whole = {**self.parameters, **self.buffers, **(slots if with_slots else {})}
        return {name: tensor.index_select(0, lanes) for name, tensor in whole.items()}


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
        plan=torch.zeros(shape, dtype=torch.int64, device=device),
        sizes=torch.zeros(shape[:2], dtype=torch.int64, device=device),
        seeds=torch.zeros(shape[:2], dtype=torch.int64, device=device),
        counter=torch.zeros(1, dtype=torch.int64, device=device),
        rates=torch.zeros(shape[:2], dtype=dtype, device=device),
        losses=torch.zeros(lanes, dtype=dtype, device=device),
        crops=torch.zeros((*shape[:2], 3, shape[2]), dtype=torch.uint8, device=device) if crops else None,
        inputs=examples.inputs,
        targets=examples.targets,
        scale=_per_channel(examples),
    )


def _per_channel(examples: Examples) -> Tensor | None:
    """Mean and deviation as a tensor on the device, because a captured graph cannot read them from the host."""
    if examples.mean is None or examples.std is None:
        return None
    both = torch.tensor([examples.mean, examples.std], device=examples.device)
    return both[:, :, None, None]


def _each(f: Callable[[Tensor], Any], nested: Any) -> Any:
    """Applies `f` to every tensor in nested dicts and tuples, in order."""
    return map_tree(lambda tensor: None if tensor is None else f(tensor), nested)
