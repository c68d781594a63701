"""The batched engine: a cohort trains as one program.

The clients' states are stacked into lanes and trained together (`step.py`). Short clients follow one another in a lane
(`packing.py`, `round_plan.py`). Messages are encoded as in every engine.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from fedpara.algorithms import Variables
from fedpara.data import FederatedData
from fedpara.engines.batched.budget import cannot_wait, lanes_that_fit
from fedpara.engines.batched.capture import capture, eager
from fedpara.engines.batched.draw_ahead import draw_ahead
from fedpara.engines.batched.drive import Event, drive, joined, trained_clients
from fedpara.engines.batched.examples import CohortExamples
from fedpara.engines.batched.kernels.install import fast_forms, install_kernels
from fedpara.engines.batched.lane_state import LaneState
from fedpara.engines.batched.passes import LanePass
from fedpara.engines.batched.round_plan import LaneShape, RoundPlan, typical_shape
from fedpara.engines.batched.scoring import scores_in_lanes
from fedpara.engines.batched.step import Tick, make_tick, one_step
from fedpara.engines.client import Reply, own_model, reply_of, unreadable
from fedpara.engines.device import find_device, precision_on
from fedpara.engines.local.trained_row import Start
from fedpara.engines.local.worker import Trained, Worker
from fedpara.engines.memory import ClientMemory, CohortMemories, PendingMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.rng import LayerRng
from fedpara.engines.session import Session
from fedpara.engines.settings import Precision
from fedpara.engines.transfer import HOST, move, move_variables
from fedpara.errors import RunError, in_a_line
from fedpara.state import State
from fedpara.tasks import Score, Task
from fedpara.wire import Message
from fedpara.wire.encoders.draws import DrawnAhead
from fedpara.wire.tensors import side_by_side

logger = logging.getLogger(__name__)


class Batched:
    name = "batched"

    def __init__(
        self,
        session: Session,
        task: Task,
        data: FederatedData,
        memory: ClientMemory,
        *,
        cohorts: Cohorts,
        shape: LaneShape | None = None,
        device: str | None = None,
        precision: Precision | None = None,
        compile: bool | None = None,
        stream: int = 0,
        stay: bool = True,
        wait: bool | None = None,
    ) -> None:
        """`cohorts` are this rank's. `stream` is this rank's number for random layers. `stay`: see `stays`.

        `wait`: whether trained states stay on the device until the last client ends. Otherwise each is freed earlier.
        """
        self.stream, self.stay, self.cohorts = stream, stay, cohorts
        self.session, self.task, self.data, self.memory = session, task, data, PendingMemory(memory)
        self.device = find_device(device)
        self.on_gpu = self.device.type == "cuda"
        self.notes: list[str] = []
        self.precision = precision_on(self.device, precision)
        self.compile = self.on_gpu if compile is None else compile
        program = session.program
        # On a CPU GroupNorm under vmap rejects channels-last.
        forms = {name: form.on(self.device, self.on_gpu) for name, form in program.forms.items()}
        self.forms = fast_forms(forms, self.device) if self.compile else forms
        self.plain = program.plain().to(self.device).train()
        self.scorer = Worker(program, task, self.device)
        if self.on_gpu:
            install_kernels(self.plain, self.scorer.model, self.device, self.compile)
        self.examples = CohortExamples(session, data, task.augment, self.device, cohorts)
        self.test_set = task.test.on(self.device) if task.test is not None else None
        self.shape = shape or typical_shape(session, data, cohorts)
        if self.lanes > (most := lanes_that_fit(session, self.device)):
            self.shape = typical_shape(session, data, cohorts, most)
            self._note(f"at most {most} clients train at a time: half of the memory holds no more lanes")
        self.waits = self.on_gpu if wait is None else wait
        if self.waits and (reason := cannot_wait(session, self.device, self.shape.clients)):
            self.waits = False
            self._note(reason)
        self._steps_done = self._steps_run = 0
        self._draws: dict[int, DrawnAhead] = {}
        self._passes = [LanePass(one, training) for training, one in enumerate(session.trainings)]

    @property
    def lanes(self) -> int:
        return self.shape.lanes

    @property
    def stays(self) -> bool:
        """Whether updates are encoded, checked and aggregated on the device. Only new memories come to the host."""
        return self.stay and self.waits and self.session.algorithm.on_any_device

    @property
    def waste(self) -> float:
        """The share of lane-steps so far without a client."""
        return 1 - self._steps_done / self._steps_run if self._steps_run else 0.0

    @property
    def why(self) -> str:
        how = f"{self.precision}, {'compiled, ' * self.compile}captured" if self.on_gpu else "eager"
        where = f"{self.device}, {how}"
        padding = [f"{self.waste:.1%} of the lanes' steps were padding"] if self._steps_run else []
        return "; ".join([f"{self.lanes} lanes on {where}", *padding, *self.notes])

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterable[Reply]:
        model, down = self._read(message, round)
        for one_pass in self._passes:
            if one_pass.lane_state is not None and not self.data.pooled:
                one_pass.lane_state.feed.release(self.data.train)
        problems = self.examples.read(clients)
        busy = [client for client in clients if self.examples.size(client)]
        own = CohortMemories(
            self.memory, busy, lambda: self.session.first_memory(model), self.device if self.stays else HOST
        )
        made = self._replies(round, busy, model, down, own, personal)
        for client in clients:
            if client in problems:
                yield Reply(client, reason=unreadable(problems[client]))
            elif self.examples.size(client):
                yield next(made)
            else:
                yield Reply(client, reason="it holds no examples")

    def _read(self, message: Message, round: int) -> tuple[State, Variables]:
        """(the model with all that a composed weight reads, the algorithm's variables)"""
        model, down = self.session.read_down(message, round)
        return {**self.session.program.start(self.session.beside), **model}, down

    def _replies(
        self,
        round: int,
        clients: Sequence[int],
        model: State,
        down: Variables,
        own: CohortMemories,
        personal: bool,
    ) -> Iterator[Reply]:
        """One reply per client, in order. Holds at most one state per lane, and those that ended out of order."""
        self._draws = {}
        there = move(model, self.device)
        # By the device on which the clients' replies are made.
        starts: dict[str, Start] = {}
        if self.stays:
            starts[self.device.type] = Start(self.session, there, move_variables(down, self.device))
        trained = [self._train(one, round, clients, there, down, own) for one in self._passes]
        width = self.lanes  # fewer once the device is out of memory
        for start in range(0, len(clients), width):
            some = clients[start : start + width]
            received = there if self.stays else model
            mine = [own_model(self.session, received, own[c]) for c in some] if personal else []
            before = self._scores(some, mine) if personal else []
            ended = [[next(one) for _ in some] for one in trained]
            beside = {name: received[name] for name in self.session.beside}
            after = self._scores(some, [{**beside, **one.state} for one in ended[-1]]) if personal else []
            for position, client in enumerate(some):
                states = [one.pop(0) for one in ended]  # frees each state as its reply is made
                where = states[0].device
                if where.type not in starts:
                    on_host = move_variables(down, HOST)
                    on_host = {name: side_by_side(state) for name, state in on_host.items()}
                    starts[HOST.type] = Start(self.session, side_by_side(move(model, HOST)), on_host)
                made, memory = reply_of(
                    starts[where.type],
                    states,
                    move_variables(own[client], where),
                    round=round,
                    client=client,
                    examples=self.examples.size(client),
                    generator=self._draws.pop(client, None),
                )
                del states
                self.memory.hold(client, round, move_variables(memory, HOST))
                yield replace(made, before=before[position], after=after[position]) if personal else made

    def commit(self, round: int, clients: Sequence[int]) -> None:
        self.memory.commit(round, clients)

    def evaluate(self, state: State) -> Score | None:
        return self.scorer.evaluate(state, self.test_set) if self.test_set is not None else None

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterator[Reply]:
        model, _ = self._read(message, round)
        for start in range(0, len(clients), self.lanes):
            some = clients[start : start + self.lanes]
            memories = self.memory.get_all(some) if self.session.stateful else [None] * len(some)
            states = [own_model(self.session, model, memory) for memory in memories]
            for client, score in zip(some, self._scores(some, states), strict=True):
                yield Reply(client, before=score)

    def _scores(self, clients: Sequence[int], states: list[State]) -> list[Score]:
        """Scores each client's own model on its own test data, one per lane at a time."""
        tests = [self.data.client_test(client) for client in clients]
        return scores_in_lanes(
            self.plain, self.forms, self.scorer, states, tests, self.device, self.lanes, self._note
        )

    def _train(
        self,
        of: LanePass,
        round: int,
        clients: Sequence[int],
        start: State,
        down: Variables,
        own: CohortMemories,
    ) -> Iterator[Trained]:
        """Trains the clients. If the device runs out of memory, halves the lanes and stops keeping states there."""
        done = 0
        while done < len(clients):
            try:
                for one in self._in_lanes(of, round, clients[done:], start, down, own):
                    done += 1
                    yield one
                continue
            except torch.OutOfMemoryError:
                if self.lanes == 1 and not self.waits:
                    raise RunError(
                        f"round {round}: a single client does not fit into the memory of {self.device}. The state "
                        "before this round is kept. Use a smaller batch, or the sequential engine."
                    ) from None
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                raise RunError(
                    f"round {round}: a step of the model or its loss cannot run in lanes, for example because it "
                    "branches on a value. The state before this round is kept. Use the sequential engine. "
                    f"({in_a_line(error)})"
                ) from error
            fewer = max(1, self.lanes // 2)
            self._note(
                f"out of memory with {self.lanes} lanes: at most {fewer} train at a time, and each state "
                "moves to the host when its client ends"
            )
            self.waits = False
            own.leave_device()
            self.shape = typical_shape(self.session, self.data, self.cohorts, fewer)
            for one_pass in self._passes:
                one_pass.forget()
            self.examples.forget_plan()
            if self.on_gpu:
                torch.cuda.empty_cache()

    def _in_lanes(
        self,
        of: LanePass,
        round: int,
        clients: Sequence[int],
        start: State,
        down: Variables,
        own: CohortMemories,
    ) -> Iterator[Trained]:
        plan = self.examples.plan(round, clients, self.lanes, of.session)
        lane_state = of.prepare(plan, start, own[clients[0]], down, self.shape, self.examples)
        tick = self._tick(plan, lane_state, of)

        def load_owned(positions: Sequence[int]) -> list[Variables]:
            return of.owned(own, [clients[position] for position in positions], lane_state)

        # Created after the warm-up: it draws numbers too, and a resumed run warms up in a different round.
        layers = LayerRng(self.session.seed, round, self.stream, self.device)
        kept = of.session.algorithm.local.keep_optimizer
        events = drive(tick, lane_state, plan, start, load_owned, self.waits, kept)
        self._steps_done += sum(segment.steps for segment in plan.segments)
        self._steps_run += self.lanes * plan.steps
        if self.waits:
            with layers:
                ended = list(events)
            if self.stays and self.on_gpu and not of.training:
                self._draws |= draw_ahead(self.session, round, clients, down)
            self.examples.plan_ahead(round, clients, self.lanes)
            trained = self._trained(joined(ended))
            yield from (trained[position] for position in range(len(clients)))
            return
        trained, position = {}, 0
        while True:
            with layers:
                event = next(events, None)
            if event is None:
                break
            trained |= self._trained(event)
            del event
            while position in trained:
                yield trained.pop(position)
                position += 1
        self.examples.plan_ahead(round, clients, self.lanes)

    def one_tick(self) -> Callable[[], None]:
        """A function that makes one step of all lanes outside any round, for benchmarks."""
        program, algorithm = self.session.program, self.session.algorithm
        model = program.initial
        self.examples.read(range(self.lanes))
        plan = self.examples.plan(1, range(self.lanes), self.lanes, self.session)
        first, of = self.session.first_memory(model), self._passes[0]
        down = algorithm.broadcast(algorithm.server_init(program.start(program.shared)))
        lane_state = of.prepare(plan, move(model, self.device), first, down, self.shape, self.examples)
        tick = self._tick(plan, lane_state, of)

        def step() -> None:
            lane_state.feed.counter.zero_()
            tick()

        return step

    def _tick(self, plan: RoundPlan, lane_state: LaneState, of: LanePass) -> Callable[[], None]:
        masked = bool((plan.sizes < lane_state.feed.plan.shape[2]).any())
        if masked not in of.ticks:
            program = self.session.program
            step = one_step(
                self.plain,
                self.forms,
                self.task.objective,
                of.session.algorithm,
                self.precision,
                program,
                masked,
            )
            of.ticks[masked] = self._ready(make_tick(step), lane_state)
        return of.ticks[masked]

    def _ready(self, tick: Tick, lane_state: LaneState) -> Callable[[], None]:
        """The tick on this lane state: captured as a CUDA graph on a GPU, eager on a CPU."""
        if not self.on_gpu:
            return eager(tick, lane_state)
        if self.compile:
            logger.info("engine: compiling the step of %d lanes; this takes minutes, once", self.lanes)
        return capture(tick, lane_state, self.compile, self._note)

    def _trained(self, event: Event) -> dict[int, Trained]:
        check = self.waits and self.on_gpu
        return trained_clients(event, self.session, check, self.stays)

    def _note(self, text: str) -> None:
        """Logs the text once, and adds it to `why`."""
        if text in self.notes:
            return
        self.notes.append(text)
        logger.info("engine: %s", text)
