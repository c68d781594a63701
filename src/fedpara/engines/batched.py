"""The batched engine: a cohort trains as one program.

The clients' states are stacked into lanes and stepped together (`stacked.py`); short clients follow one
another in a lane (`lanes.py`). What each client sends is encoded for real, as in every engine.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import vmap

from fedpara import parameterization
from fedpara.algorithms import Groups, Local
from fedpara.data import Examples, FederatedData, normalise
from fedpara.engines import lanes as packing
from fedpara.engines.batches import batches
from fedpara.engines.client import PRIVATE, Protocol, Reply, own_variables, reply_of
from fedpara.engines.lanes import Segment
from fedpara.engines.memory import ClientMemory, Held
from fedpara.engines.stacked import Lanes, Precision, capture, make_tick, one_step, stack
from fedpara.engines.streams import cohort, numbers, torch_seed
from fedpara.engines.task import Task
from fedpara.engines.worker import Score, Trained, Worker
from fedpara.state import State, zeros_like

TYPICAL_COHORTS = 20


class Batched:
    name = "batched"

    def __init__(
        self,
        protocol: Protocol,
        task: Task,
        data: FederatedData,
        memory: ClientMemory,
        *,
        size: int,
        device: str | None = None,
        precision: Precision | None = None,
        compile: bool | None = None,
    ) -> None:
        self.protocol, self.task, self.data, self.memory = protocol, task, data, Held(memory)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.on_gpu = self.device.type == "cuda"
        self.precision: Precision = precision or ("bfloat16" if self.on_gpu else "float32")
        self.compile = self.on_gpu if compile is None else compile
        self.notes: list[str] = []
        if self.on_gpu:
            _set_precision(self.precision)
        program = protocol.program
        self.forms = parameterization.forms(program.model)
        model = parameterization.merge(program.model) if self.forms else deepcopy(program.model)
        self.plain = model.to(self.device).train()
        self.judge = Worker(program, device=self.device)
        self.train_set = on_device(data.train, self.device)
        self.test_set = on_device(task.test, self.device) if task.test is not None else None
        self.lanes = packing.choose(self._typical_cohorts(size), size)
        self.waste = 0.0
        self._places: Lanes | None = None
        self._ticks: dict[bool, Callable[[], None]] = {}
        self._ahead: tuple[int, Sequence[int], _Plan] | None = None

    @property
    def why(self) -> str:
        how = (
            "compiled and captured"
            if self.on_gpu and self.compile
            else "compiled"
            if self.compile
            else "eager"
        )
        return "; ".join([f"{self.lanes} lanes on {self.device}, {self.precision}, {how}", *self.notes])

    def train(self, round: int, clients: Sequence[int], message: bytes, personal: bool) -> Iterable[Reply]:
        model, down = self.protocol.read_down(message, round)
        busy = [client for client in clients if self.data.size(client)]
        memories = [self.memory.get(client) or self.protocol.first(model) for client in busy]
        tests = [on_device(self.data.client_test(client), self.device) for client in busy] if personal else []
        starts = [{**model, **memory[PRIVATE]} for memory in memories]
        before = [self.judge.evaluate(start, test) for start, test in zip(starts, tests, strict=False)]
        trained = self._train(round, busy, starts, model, down, memories) if busy else []
        after = [self.judge.evaluate(one.state, test) for one, test in zip(trained, tests, strict=False)]

        def reply(place: int) -> tuple[Reply, Groups]:
            client = busy[place]
            made, kept = reply_of(
                self.protocol,
                trained[place],
                model,
                down,
                memories[place],
                round=round,
                client=client,
                examples=self.data.size(client),
            )
            return (replace(made, before=before[place], after=after[place]) if personal else made), kept

        with ThreadPoolExecutor() as pool:
            replies = dict(zip(busy, pool.map(reply, range(len(busy))), strict=True))
        for client in clients:
            if client not in replies:
                yield Reply(client, reason="it holds no examples")
                continue
            made, kept = replies[client]
            self.memory.hold(client, kept)
            yield made

    def keep(self, round: int, clients: Sequence[int]) -> None:
        self.memory.keep(round, clients)

    def evaluate(self, state: State) -> Score | None:
        return self.judge.evaluate(state, self.test_set) if self.test_set is not None else None

    def _train(
        self,
        round: int,
        clients: Sequence[int],
        starts: list[State],
        model: State,
        down: Groups,
        memories: list[Groups],
    ) -> list[Trained]:
        plan = self._plan(round, clients)
        places = self._prepare(plan, starts[0], model, down, own_variables(memories[0]))
        places.lr.fill_(self.protocol.algorithm.local.lr_at(round))
        tick = self._tick(plan.masked, places)
        # After the tick is made: warming it up draws numbers too, and a resumed run makes it in another round.
        with torch.random.fork_rng(devices=[self.device] if self.on_gpu else []):
            torch.manual_seed(torch_seed(self.protocol.seed, "layers", round))
            ended = self._run(tick, plan, places, starts, memories)
        self._think_ahead(round, len(clients))
        return self._collect(ended)

    def _run(
        self,
        tick: Callable[[], None],
        plan: "_Plan",
        places: Lanes,
        starts: list[State],
        memories: list[Groups],
    ) -> list[tuple[Segment, dict[str, State]]]:
        """Step all lanes to the next client's end, let those that end leave and the next ones in, and on."""
        waiting = sorted(plan.segments, key=lambda s: s.start)
        ended: list[tuple[Segment, dict[str, State]]] = []
        places.counter.zero_()
        at = 0
        for event in sorted({0} | {segment.end for segment in plan.segments}):
            for _ in range(event - at):
                tick()
            at = event
            ended += [(s, self._lift(places, s)) for s in plan.segments if s.end == event]
            while waiting and waiting[0].start <= event:
                segment = waiting.pop(0)
                own = own_variables(memories[segment.client])
                self._lay(places, segment.lane, starts[segment.client], own)
        return ended

    def _plan(self, round: int, clients: Sequence[int]) -> "_Plan":
        if self._ahead is not None and self._ahead[:2] == (round, clients):
            return self._ahead[2]
        return _Plan.make(self.protocol, self.data, round, clients, self.lanes)

    def _think_ahead(self, round: int, size: int) -> None:
        """The plan of the next round, made while the device still works on this one."""
        if not self.on_gpu:
            return
        clients = cohort(self.protocol.seed, round + 1, len(self.data), size)
        if all(self.data.size(client) for client in clients):
            plan = _Plan.make(self.protocol, self.data, round + 1, clients, self.lanes)
            self._ahead = (round + 1, clients, plan)

    def _prepare(self, plan: "_Plan", start: State, model: State, down: Groups, own: Groups) -> Lanes:
        """The fixed places, made once and filled anew each round; a longer plan needs new ones."""
        program, local = self.protocol.program, self.protocol.algorithm.local
        x = {name: model[name] for name in program.shared}
        places = self._places
        if places is None or places.plan.shape[1] < plan.index.shape[1]:
            longest = max(plan.index.shape[1], self._longest())
            parameters = stack([{n: start[n] for n in program.parameters}] * self.lanes, self.device)
            self._ticks = {}
            places = self._places = Lanes(
                parameters=parameters,
                velocity={n: torch.zeros_like(t) for n, t in parameters.items()} if local.momentum else {},
                buffers=stack([{n: start[n] for n in program.buffers}] * self.lanes, self.device),
                own={name: stack([state] * self.lanes, self.device) for name, state in own.items()},
                x={name: tensor.to(self.device, copy=True) for name, tensor in x.items()},
                down={g: {n: t.to(self.device, copy=True) for n, t in s.items()} for g, s in down.items()},
                plan=torch.zeros(
                    (self.lanes, longest, local.batch_size), dtype=torch.int64, device=self.device
                ),
                sizes=torch.zeros((self.lanes, longest), dtype=torch.int64, device=self.device),
                counter=torch.zeros(1, dtype=torch.int64, device=self.device),
                lr=torch.zeros((), device=self.device),
                losses=torch.zeros(self.lanes, device=self.device),
            )
        steps = plan.index.shape[1]
        places.plan[:, :steps].copy_(torch.from_numpy(plan.index))
        places.sizes.zero_()
        places.sizes[:, :steps].copy_(torch.from_numpy(plan.sizes))
        for name, tensor in x.items():
            places.x[name].copy_(tensor)
        for group, members in down.items():
            for name, tensor in members.items():
                places.down[group][name].copy_(tensor)
        self.waste = packing.waste(plan.segments, self.lanes)
        return places

    def _longest(self) -> int:
        """Room for the longest client anywhere, so that the places seldom have to grow."""
        sample = self._typical_cohorts(self.lanes)
        return max(packing.length(packing.pack(steps, self.lanes)) for steps in sample)

    def _tick(self, masked: bool, places: Lanes) -> Callable[[], None]:
        if masked not in self._ticks:
            program = self.protocol.program
            step = one_step(
                self.plain, self.forms, self.protocol.algorithm, self.precision, program.shared, masked
            )
            tick = make_tick(step, self.train_set, places, self.task.augment)
            self._ticks[masked] = capture(tick, places, self.compile, self.notes) if self.on_gpu else tick
        return self._ticks[masked]

    def _lay(self, places: Lanes, lane: int, start: State, own: Groups) -> None:
        """A client takes its lane."""
        for tensors in (places.parameters, places.buffers):
            for name, tensor in tensors.items():
                tensor[lane].copy_(start[name], non_blocking=True)
        for tensor in places.velocity.values():
            tensor[lane].zero_()
        for group, members in own.items():
            for name, tensor in members.items():
                places.own[group][name][lane].copy_(tensor, non_blocking=True)
        places.losses[lane].zero_()

    def _lift(self, places: Lanes, segment: Segment) -> dict[str, State]:
        """A client leaves its lane with what it has become."""
        lane = segment.lane
        return {
            "parameters": {name: tensor[lane].clone() for name, tensor in places.parameters.items()},
            "buffers": {name: tensor[lane].clone() for name, tensor in places.buffers.items()},
            "loss": {"sum": places.losses[lane].clone()},
        }

    def _collect(self, ended: list[tuple[Segment, dict[str, State]]]) -> list[Trained]:
        """To the host, one tensor of all clients at a time, in the cohort's order."""
        ended = sorted(ended, key=lambda pair: pair[0].client)
        groups = {
            group: {name: torch.stack([made[group][name] for _, made in ended]).cpu() for name in members}
            for group, members in ended[0][1].items()
        }
        return [
            Trained(
                {name: tensor[i] for name, tensor in groups["parameters"].items()},
                {name: tensor[i] for name, tensor in groups["buffers"].items()},
                float(groups["loss"]["sum"][i]) / max(1, segment.steps),
                segment.steps,
            )
            for i, (segment, _) in enumerate(ended)
        ]

    def _typical_cohorts(self, size: int) -> list[list[int]]:
        local = self.protocol.algorithm.local
        drawn = [cohort(self.protocol.seed, t, len(self.data), size) for t in range(1, TYPICAL_COHORTS + 1)]
        return [[local.steps_for(self.data.size(client)) for client in clients] for clients in drawn]


class _Plan:
    """Who runs where, and which examples each step sees: [lane, step, batch] and the batches' sizes."""

    def __init__(
        self, segments: list[Segment], index: NDArray[np.int64], sizes: NDArray[np.int64], masked: bool
    ) -> None:
        self.segments, self.index, self.sizes, self.masked = segments, index, sizes, masked

    @staticmethod
    def make(
        protocol: Protocol, data: FederatedData, round: int, clients: Sequence[int], lanes: int
    ) -> "_Plan":
        local = protocol.algorithm.local
        held = [np.asarray(data.clients[client]) for client in clients]
        segments = packing.pack([local.steps_for(len(examples)) for examples in held], lanes)
        steps = packing.length(segments)
        index = np.zeros((lanes, steps, local.batch_size), np.int64)
        sizes = np.zeros((lanes, steps), np.int64)
        for segment in segments:
            order = numbers(protocol.seed, "batches", round, clients[segment.client])
            examples = held[segment.client]
            for i, batch in enumerate(batches(len(examples), local, order), segment.start):
                index[segment.lane, i, : len(batch)] = examples[batch]
                sizes[segment.lane, i] = len(batch)
        return _Plan(segments, index, sizes, bool((sizes < local.batch_size).any()))


def unfit(protocol: Protocol, task: Task, data: FederatedData) -> str:
    """Why this experiment cannot run batched, or "". A step of one example tells what vmap thinks of the model."""
    program, local = protocol.program, protocol.algorithm.local
    forms = parameterization.forms(program.model)
    if local.jacobian and program.buffers:
        return "the Jacobian correction has no batched form for a model with buffers"
    if local.jacobian and not forms:
        return "the Jacobian correction needs factorized weights"
    if _normalises_by_batch(program.model) and _uneven(data, local):
        return "BatchNorm would see the padding of short batches"
    plain = parameterization.merge(program.model) if forms else deepcopy(program.model)
    step = one_step(plain.train(), forms, protocol.algorithm, "float32", program.shared, True)
    first = np.array(data.clients[next(i for i in range(len(data)) if data.size(i))])[:1]
    images = normalise(data.train.inputs[first], data.train.mean, data.train.std)
    images = torch.cat([images, images])
    labels = data.train.labels[first].repeat(2)
    x = program.start(program.shared)
    own = protocol.algorithm.client_init(x)
    down = protocol.algorithm.broadcast(protocol.algorithm.server_init(x))
    parameters = program.start(program.parameters)
    velocity = zeros_like(parameters) if local.momentum else {}
    states = [parameters, velocity, program.start(program.buffers)]
    lanes = [stack([state], torch.device("cpu")) if state else {} for state in states]
    stacked_own = {group: stack([state], torch.device("cpu")) for group, state in own.items()}
    try:
        with torch.random.fork_rng(devices=[]):
            vmap(step, in_dims=(0, 0, 0, 0, 0, 0, 0, None, None, None), randomness="different")(
                *lanes, stacked_own, images[None], labels[None], torch.tensor([2]), x, down, torch.tensor(0.1)
            )
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def _normalises_by_batch(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _uneven(data: FederatedData, local: Local) -> bool:
    return any(data.size(i) % local.batch_size for i in range(min(len(data), 1000)))


def on_device(examples: Examples, device: torch.device) -> Examples:
    owners = examples.owners
    return replace(
        examples, inputs=examples.inputs.to(device), labels=examples.labels.to(device), owners=owners
    )


def _set_precision(precision: Precision) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    torch.backends.cudnn.benchmark = True
