"""CapturedSteps: records a worker's local steps, and replays them for all clients and rounds.

    the first steps on batches of a shape    run as they are, and are also the warm-up
    the next one                             is recorded, which executes nothing, and replayed
    all later ones                           are replayed

So nothing has to be restored, and a run of few steps records nothing. Everything a step reads is at a fixed address:
the model's tensors; the batch, the learning rate and the dropout seeds, which are filled in before each step; and x,
down, the client's variables and the optimizer's slots, which are copied in for each client.

A replay runs no Python. A step that changes anything on the host (`host_state.py`), or waits for the device, is not
captured: the engine then says why, and the steps run one by one. State outside modules, the loss and generators, such
as a global counter, is not detected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from fedpara.algorithms.optimizers import Slots
from fedpara.cuda_graphs import Recorder, Replay
from fedpara.engines.local.augment import crop_flip
from fedpara.engines.local.dropout import SeededDropout, layer_seed, step_seed
from fedpara.engines.local.host_state import HostState, attributes, changed, generators, with_parts
from fedpara.engines.local.training import Plan, Training
from fedpara.errors import in_a_line
from fedpara.state import State
from fedpara.trees import Tree, describe, leaves, map_tree, rows

WARM_UP = 2
"""Steps that run before the first one is recorded."""
TRIES = 4
"""After this many steps on batches of a shape, a step may no longer change the host. The first may set things up."""
GRAPHS, KINDS = 32, 4
"""The largest number of recorded steps, and of sets of fixed tensors."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Step = Callable[[Tree, Tree, Training, Slots, Tensor], tuple[Slots, Tensor]]
"""(inputs, targets, training, slots, eta) -> the new slots, the loss"""


@dataclass(eq=False)
class _Batch:
    """The batch that steps of one shape read."""

    inputs: Tree
    targets: Tree
    crops: Tensor | None
    wanted: bool = True  # whether it is to be recorded
    runs: int = 0
    sets: str = ""  # what the last step changed on the host
    seen: HostState = field(default_factory=dict)  # after that step; keeps the tensors that a graph reads
    replay: Replay | None = None

    def fill(self, inputs: Tree, targets: Tree, index: Tensor, crops: Tensor | None) -> None:
        for room, held in ((self.inputs, inputs), (self.targets, targets)):
            map_tree(lambda here, there: torch.index_select(there, 0, index, out=here), room, held)
        if self.crops is not None and crops is not None:
            self.crops.copy_(crops)


@dataclass(eq=False)
class _Fixed:
    """The tensors that the steps of an algorithm read and write."""

    training: Training  # with copies of x, down and the client's variables
    slots: Slots
    eta: Tensor
    total: Tensor  # the sum of the losses
    batches: dict[tuple[str, str, int], _Batch] = field(default_factory=dict)


class CapturedSteps:
    def __init__(
        self,
        model: nn.Module,
        parameters: State,
        dropouts: Sequence[SeededDropout],
        loss: object,
        recorder: Recorder,
    ) -> None:
        """`parameters` are the model's trainable tensors."""
        self._parameters, self._dropouts, self._recorder = parameters, dropouts, recorder
        self._watched = [*with_parts("", model), *with_parts("the loss", loss)]
        self._on_gpu = any(tensor.is_cuda for tensor in parameters.values())
        self._fixed: dict[tuple[int, str, str], _Fixed] = {}
        self._runs = self.recorded = 0
        self.problem = uncapturable(model, parameters)
        self.notes: list[str] = []
        if self.problem:
            self._note(self.problem)

    def takes(self, training: Training, private: bool) -> bool:
        """Whether these steps may be replayed. `private`: each example's gradient is clipped."""
        if private:
            self._note("example-level privacy computes each example's gradient")
        elif training.local.jacobian:
            self._note("the Jacobian correction")
        elif len(self._fixed) == KINDS and _key(training) not in self._fixed:
            self._note(f"more than {KINDS} kinds of algorithms and variables")
        else:
            return not self.problem
        return False

    def run(
        self, step: Step, training: Training, inputs: Tree, targets: Tree, plan: Plan, slots: Slots | None
    ) -> tuple[Slots, Tensor]:
        """All steps of a client. (the optimizer's slots, the sum of the losses); the next client overwrites both.

        `step` is the same function in every call. Storing it would create a reference cycle that keeps GPU memory.
        """
        whole = {name: tensor.detach() for name, tensor in self._parameters.items()}
        fixed = self._enter(training, whole, slots)
        rate = None
        of_inputs, of_targets = (describe(rows(tree, slice(0))) for tree in (inputs, targets))
        for number, index in enumerate(plan.batches):
            crops = plan.crops[number] if plan.crops else None
            batch = self._batch(fixed, (of_inputs, of_targets, len(index)), inputs, targets, crops)
            batch.fill(inputs, targets, index, crops)
            if plan.rates[number] != rate:
                rate = plan.rates[number]
                fixed.eta.fill_(rate)
            if self._dropouts:
                seed = step_seed(plan.stream, number)
                for layer, dropout in enumerate(self._dropouts):
                    dropout.seed.fill_(layer_seed(seed, layer))
            self._do(partial(self._local_step, step, fixed, batch), batch)
        return fixed.slots, fixed.total

    def _enter(self, training: Training, whole: State, slots: Slots | None) -> _Fixed:
        """The fixed tensors with this client's values."""
        key, optimizer = _key(training), training.optimizer
        fixed = self._fixed.get(key)
        if fixed is None:
            copies = map_tree(
                torch.clone, {"x": training.x, "down": training.down, "client": training.client}
            )
            device = next(iter(whole.values())).device
            exact = any(tensor.dtype == torch.float64 for tensor in whole.values())
            eta, total = torch.zeros(
                2, dtype=torch.float64 if exact else torch.float32, device=device
            ).unbind()
            first = map_tree(torch.clone, slots or optimizer.init(whole))
            fixed = self._fixed[key] = _Fixed(replace(training, **copies), first, eta, total)
            return fixed
        for name in ("x", "down", "client"):
            _overwrite(getattr(fixed.training, name), getattr(training, name))
        if slots:
            _overwrite(fixed.slots, slots)
        elif isinstance(training.local.optimizer, str):  # the library's slots start at zero
            for state in fixed.slots.values():
                torch._foreach_zero_(list(state.values()))
        else:
            _overwrite(fixed.slots, optimizer.init(whole))
        fixed.total.zero_()
        return fixed

    def _batch(
        self, fixed: _Fixed, key: tuple[str, str, int], inputs: Tree, targets: Tree, crops: Tensor | None
    ) -> _Batch:
        if key in fixed.batches:
            return fixed.batches[key]
        room = [map_tree(lambda t: t.new_empty((key[-1], *t.shape[1:])), tree) for tree in (inputs, targets)]
        batch = _Batch(room[0], room[1], None if crops is None else torch.empty_like(crops))
        if sum(len(one.batches) for one in self._fixed.values()) < GRAPHS:
            fixed.batches[key] = batch
        else:
            batch.wanted = False
            self._note(f"batches of other shapes than the first {GRAPHS}")
        return batch

    def _do(self, step: Callable[[], None], batch: _Batch) -> None:
        """One step: replayed, or recorded and replayed, or run."""
        if batch.wanted and batch.replay is None and not self.problem:
            sets = batch.sets or changed(batch.seen, attributes(self._watched))
            if self._runs < WARM_UP or not batch.runs or (sets and batch.runs < TRIES):
                self._warm_up(step, batch)
                return
            if sets:
                self._refuse(f"a step sets {sets}")
            else:
                batch.replay = self._recorded(step, batch.seen)
        (batch.replay or step)()

    def _local_step(self, step: Step, fixed: _Fixed, batch: _Batch) -> None:
        for dropout in self._dropouts:
            dropout.calls = 0
        inputs = batch.inputs if batch.crops is None else crop_flip(batch.inputs, batch.crops)
        slots, loss = step(inputs, batch.targets, fixed.training, fixed.slots, fixed.eta)
        if slots is not fixed.slots:
            if _alike(slots, fixed.slots):
                _overwrite(fixed.slots, map_tree(torch.clone, slots))  # it may return one slot as another
            else:
                fixed.slots = slots
                self._refuse("the optimizer's step returns other slots than its init")
        fixed.total.add_(loss)

    def _warm_up(self, step: Callable[[], None], batch: _Batch) -> None:
        before, drawn = attributes(self._watched), generators(self._on_gpu)
        self._recorder.warm_up(step)
        batch.seen = attributes(self._watched)
        batch.sets = changed(before, batch.seen)
        batch.runs += 1
        self._runs += 1
        if source := changed(drawn, generators(self._on_gpu)):
            self._refuse(f"a step draws from {source}")

    def _recorded(self, step: Callable[[], None], seen: HostState) -> Replay | None:
        """The step as a replay; None, with a note, if it cannot be recorded."""
        try:
            replay = self._recorder.record(step)
        except Exception as error:
            self._refuse(in_a_line(error).rstrip("."))
            return None
        if what := changed(seen, attributes(self._watched)):
            self._refuse(f"a step sets {what}")
        if self.problem:
            return None
        self.recorded += 1
        return replay

    def _refuse(self, problem: str) -> None:
        """Ends capturing: all later steps run one by one, and the recorded ones are freed."""
        self.problem = problem
        self._note(problem)
        for fixed in self._fixed.values():
            for batch in fixed.batches.values():
                batch.replay = None
        self._fixed.clear()
        self.recorded = 0

    def _note(self, text: str) -> None:
        if (note := f"not captured: {text}") not in self.notes:
            self.notes.append(note)


def uncapturable(model: nn.Module, parameters: State) -> str:
    """Why the model's steps cannot be captured, judged by its layers and their types, or ""."""
    for name, module in model.named_modules():
        if any(getattr(module, kind) for kind in HOOKS):
            return f"{name or 'the model'} has hooks"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name or 'the model'} has sparse gradients"
        if isinstance(module, nn.RNNBase) and module.dropout:
            # cuDNN keeps the state of this dropout itself: a replay would not start from the client's seed.
            return f"{name or 'the model'} is a recurrent layer with dropout"
    narrow = (
        f"{n} is {str(t.dtype).removeprefix('torch.')}" for n, t in parameters.items() if t.dtype.itemsize < 4
    )
    return next(narrow, "")  # the learning rate, a tensor, would be rounded to that type


def _key(training: Training) -> tuple[int, str, str]:
    """Trainings with the same key share fixed tensors. These keep the algorithm alive, so its id is not reused."""
    return id(training.algorithm), describe(training.down), describe(training.client)


def _alike(slots: Slots, others: Slots) -> bool:
    """Whether they have the same names, shapes and types, in any order."""
    return slots.keys() == others.keys() and all(
        state.keys() == others[slot].keys()
        and all(
            (t.shape, t.dtype) == (others[slot][n].shape, others[slot][n].dtype) for n, t in state.items()
        )
        for slot, state in slots.items()
    )


def _overwrite(here: Tree, there: Tree) -> None:
    if old := leaves(here):
        torch._foreach_copy_(old, leaves(map_tree(lambda _, new: new, here, there)))
