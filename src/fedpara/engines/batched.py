"""The batched engine: a cohort trains as one program.

The clients' states are stacked into lanes and stepped together (`stacked.py`); short clients follow one
another in a lane (`lanes.py`, `plan.py`). What each client sends is encoded for real, as in every engine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from fedpara.algorithms import Groups
from fedpara.data import FederatedData
from fedpara.engines.capture import capture
from fedpara.engines.client import PRIVATE, Protocol, Reply, own_model, own_variables, reply_of
from fedpara.engines.device import host_memory, on_device, precision_on, room_on
from fedpara.engines.freight import bring, bring_all, bring_groups, fetch
from fedpara.engines.memory import ClientMemory, Held, OwnParts
from fedpara.engines.normalization import by_channel
from fedpara.engines.places import Lanes, places_for
from fedpara.engines.plan import Outlook, Plan, look_ahead, make_plan
from fedpara.engines.pooling import by_mean
from fedpara.engines.scoring import scores
from fedpara.engines.stacked import Precision, make_tick, one_step
from fedpara.engines.streams import LayerStream, cohort
from fedpara.engines.task import Task
from fedpara.engines.traffic import Event, Owned, drive
from fedpara.engines.worker import Score, Trained, Worker
from fedpara.errors import RunError, in_a_line
from fedpara.state import State, nbytes
from fedpara.wire import Letter, Link


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
        outlook: Outlook | None = None,
        device: str | None = None,
        precision: Precision | None = None,
        compile: bool | None = None,
        say: Callable[[str], None] | None = None,
        stream: int = 0,
        stay: bool = True,
        wait: bool | None = None,
    ) -> None:
        """`stream` keeps apart what layers draw in several such engines of one run; `stay`: see `stays`.

        `wait`: whether trained states may wait on the device for the last one. On the host each is let go as it ends.
        """
        self.stream, self.stay = stream, stay
        self.protocol, self.task, self.data, self.memory = protocol, task, data, Held(memory)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.on_gpu = self.device.type == "cuda"
        self.notes: list[str] = []
        self.say = say or (lambda text: None)
        self.precision = precision_on(self.device, precision)
        self.compile = self.on_gpu if compile is None else compile
        program = protocol.program
        # On a CPU GroupNorm under vmap refuses channels-last.
        self.forms = {name: replace(form, channels_last=self.on_gpu) for name, form in program.forms.items()}
        self.plain = program.plain().to(self.device).train()
        self.judge = Worker(program, device=self.device)
        if self.on_gpu:  # here, for they register ops with torch, which a CPU has no use for
            from fedpara.engines.convolution import through_lanes
            from fedpara.engines.ops import pays_on
            from fedpara.engines.recurrence import through_recurrence

            kernels = pays_on(self.device)
            by_mean(self.plain)
            through_recurrence(self.plain, kernels)
            through_recurrence(self.judge.model)
            if kernels:
                through_lanes(self.plain)
            if self.compile:
                by_channel(self.plain)
        self.train_set = on_device(data.train, self.device)
        self.test_set = on_device(task.test, self.device) if task.test is not None else None
        self.outlook = outlook or look_ahead(protocol, data, size)
        self._narrow(size)
        self.waits = (self.on_gpu if wait is None else wait) and self._fits(size)
        self._steps_done = self._steps_run = 0
        self._places: Lanes | None = None
        self._ticks: dict[bool, Callable[[], None]] = {}
        self._ahead: tuple[int, Sequence[int], Plan] | None = None

    @property
    def lanes(self) -> int:
        return self.outlook.lanes

    @property
    def stays(self) -> bool:
        """Whether updates stay on the device, where the server then checks and aggregates them: the model's own, as it
        is. What clients keep and send beside it is made on the host, and so is what a narrow link leaves of it."""
        alone = not self.protocol.keeps and not self.protocol.extras and self.protocol.link == Link()
        return self.stay and self.waits and alone and self.protocol.algorithm.on_any_device

    @property
    def waste(self) -> float:
        """The share of lane-steps so far that no client was in."""
        return 1 - self._steps_done / self._steps_run if self._steps_run else 0.0

    @property
    def why(self) -> str:
        how = "compiled, captured" if self.compile else "captured"
        where = f"{self.device}, {self.precision}, {how if self.on_gpu else 'eager'}"
        padding = [f"{self.waste:.1%} of the lanes' steps were padding"] if self._steps_run else []
        return "; ".join([f"{self.lanes} lanes on {where}", *padding, *self.notes])

    def train(self, round: int, clients: Sequence[int], message: Letter, personal: bool) -> Iterable[Reply]:
        model, down = self.protocol.read_down(message, round)
        busy = [client for client in clients if self.data.size(client)]
        own = OwnParts(self.memory, busy, lambda: self.protocol.first(model))
        made = self._replies(round, busy, model, down, own, personal)
        for client in clients:
            yield next(made) if self.data.size(client) else Reply(client, reason="it holds no examples")

    def _replies(
        self, round: int, clients: Sequence[int], model: State, down: Groups, own: OwnParts, personal: bool
    ) -> Iterator[Reply]:
        """In the clients' order; as many states are held as there are lanes, and those that ended out of order."""
        seen = (bring(model, self.device), bring_groups(down, self.device)) if self.stays else (model, down)
        trained = self._train(round, clients, model, down, own)
        for start in range(0, len(clients), self.lanes):
            some = clients[start : start + self.lanes]
            before = self._scores(some, [{**model, **own[c][PRIVATE]} for c in some]) if personal else []
            ended = [next(trained) for _ in some]
            after = self._scores(some, [one.state for one in ended]) if personal else []
            for place, client in enumerate(some):
                examples = self.data.size(client)
                made, kept = reply_of(  # each state is let go as its reply is made
                    self.protocol,
                    ended.pop(0),
                    *seen,
                    own[client],
                    round=round,
                    client=client,
                    examples=examples,
                )
                self.memory.hold(client, round, kept)
                yield replace(made, before=before[place], after=after[place]) if personal else made

    def keep(self, round: int, clients: Sequence[int]) -> None:
        self.memory.keep(round, clients)

    def evaluate(self, state: State) -> Score | None:
        return self.judge.evaluate(state, self.test_set) if self.test_set is not None else None

    def score_clients(self, round: int, clients: Sequence[int], message: Letter) -> Iterator[Reply]:
        model, _ = self.protocol.read_down(message, round)
        for start in range(0, len(clients), self.lanes):
            some = clients[start : start + self.lanes]
            found = self.memory.get_all(some) if self.protocol.keeps else [None] * len(some)
            states = [own_model(self.protocol, model, memory) for memory in found]
            for client, score in zip(some, self._scores(some, states), strict=True):
                yield Reply(client, before=score)

    def _scores(self, clients: Sequence[int], states: list[State]) -> list[Score]:
        """Each client's own model on its own test data, as many at once as there are lanes."""
        tests = [self.data.client_test(client) for client in clients]
        found = [Score(0, 0, 0.0)] * len(clients)
        able = [place for place, test in enumerate(tests) if len(test)]
        for start in range(0, len(able), self.lanes):
            chosen = able[start : start + self.lanes]
            stacked = bring_all([states[place] for place in chosen], self.device)
            there = [on_device(tests[place], self.device) for place in chosen]
            try:
                scored = scores(self.plain, self.forms, stacked, there)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.plain.train()
                scored = [self.judge.evaluate(states[p], t) for p, t in zip(chosen, there, strict=True)]
                note = f"clients' own models are scored one after another: {in_a_line(error)}"
                self.notes += [note] if note not in self.notes else []
            for place, score in zip(chosen, scored, strict=True):
                found[place] = score
        return found

    def _train(
        self, round: int, clients: Sequence[int], model: State, down: Groups, own: OwnParts
    ) -> Iterator[Trained]:
        """In fewer lanes after each try that the device has no memory for, and no state waits there any more."""
        done = 0
        while done < len(clients):
            try:
                for one in self._in_lanes(round, clients[done:], model, down, own):
                    done += 1
                    yield one
                continue
            except torch.OutOfMemoryError:
                if self.lanes == 1 and not self.waits:
                    raise RunError(
                        f"round {round}: one client alone is too large for {self.device}'s memory. The state "
                        "before it is kept. Lower the batch size, or use the sequential engine."
                    ) from None
            fewer = max(1, self.lanes // 2)
            self._note(
                f"out of memory with {self.lanes} lanes: the cohort goes in waves of {fewer}, and states go to "
                "the host as clients end"
            )
            self.waits = False
            self.outlook = look_ahead(self.protocol, self.data, len(clients), fewer)
            self._places, self._ticks, self._ahead = None, {}, None
            if self.on_gpu:
                torch.cuda.empty_cache()

    def _in_lanes(
        self, round: int, clients: Sequence[int], model: State, down: Groups, own: OwnParts
    ) -> Iterator[Trained]:
        plan = self._plan(round, clients)
        start, first = bring(model, self.device), own[clients[0]]
        places = self._prepare(plan, start, first[PRIVATE], down, own_variables(first))
        places.lr.fill_(self.protocol.algorithm.local.lr_at(round))
        tick = self._tick(plan, places)

        def bring_own(of: Sequence[int]) -> Owned:
            parts = own.of([clients[place] for place in of])
            stacked = {g: bring_all([part[g] for part in parts], self.device) for g in parts[0]}
            return stacked.pop(PRIVATE), stacked

        # After the tick is made: warming it up draws numbers too, and a resumed run makes it in another round.
        layers = LayerStream(self.protocol.seed, round, self.stream, self.device)
        events = drive(tick, places, plan, start, bring_own, self.waits)
        self._steps_done += sum(segment.steps for segment in plan.segments)
        self._steps_run += self.lanes * plan.steps
        if self.waits:
            with layers:
                ended = list(events)
            self._think_ahead(round, clients)
            trained = self._collect(_joined(ended))
            yield from (trained[place] for place in range(len(clients)))
            return
        trained, place = {}, 0
        while True:
            with layers:
                event = next(events, None)
            if event is None:
                break
            trained |= self._collect(event)
            del event
            while place in trained:
                yield trained.pop(place)
                place += 1
        self._think_ahead(round, clients)

    def one_tick(self) -> Callable[[], None]:
        """One step of all lanes, again and again, outside any round: what a benchmark times."""
        program, algorithm = self.protocol.program, self.protocol.algorithm
        model = program.initial
        plan = make_plan(self.protocol, self.data, self.task.augment, 1, range(self.lanes), self.lanes)
        first = self.protocol.first(model)
        down = algorithm.broadcast(algorithm.server_init(program.start(program.shared)))
        places = self._prepare(plan, bring(model, self.device), first[PRIVATE], down, own_variables(first))
        places.lr.fill_(algorithm.local.lr)
        tick = self._tick(plan, places)

        def step() -> None:
            places.counter.zero_()
            tick()

        return step

    def _plan(self, round: int, clients: Sequence[int]) -> Plan:
        if self._ahead is not None and self._ahead[:2] == (round, clients):
            return self._ahead[2]
        return make_plan(self.protocol, self.data, self.task.augment, round, clients, self.lanes)

    def _think_ahead(self, round: int, clients: Sequence[int]) -> None:
        """The plan of the next round, made while the device still works on this one.

        Not where these are but a share of the cohort (ranks, clients without examples): the next is then no guess
        of ours.
        """
        drawn = [cohort(self.protocol.seed, t, len(self.data), len(clients)) for t in (round, round + 1)]
        if not self.on_gpu or drawn[0] != list(clients) or not all(map(self.data.size, drawn[1])):
            return
        plan = make_plan(self.protocol, self.data, self.task.augment, round + 1, drawn[1], self.lanes)
        self._ahead = (round + 1, drawn[1], plan)

    def _prepare(self, plan: Plan, start: State, private: State, down: Groups, own: Groups) -> Lanes:
        """The fixed places, made once and filled anew each round; a longer or wider plan needs new ones."""
        places = self._places
        if places is None or plan.steps > places.plan.shape[1] or plan.width > places.plan.shape[2]:
            shape = (self.lanes, max(plan.steps, self.outlook.steps), max(plan.width, self.outlook.width))
            whole = {**start, **bring(private, self.device)}
            there = bring_groups(own, self.device)
            self._ticks = {}
            self._places = places = places_for(
                self.protocol, whole, down, there, shape, self.task.augment == "crop-flip", self.train_set
            )
        x = {name: start[name] for name in self.protocol.program.shared}
        places.fill(plan, x, bring_groups(down, self.device))
        return places

    def _tick(self, plan: Plan, places: Lanes) -> Callable[[], None]:
        masked = bool((plan.sizes < places.plan.shape[2]).any())
        if masked not in self._ticks:
            program = self.protocol.program
            step = one_step(
                self.plain, self.forms, self.protocol.algorithm, self.precision, program.shared, masked
            )
            self._ticks[masked] = self._ready(make_tick(step), places)
        return self._ticks[masked]

    def _ready(self, tick: Callable[[Lanes], None], places: Lanes) -> Callable[[], None]:
        """The tick on these places, by the fastest way that the device has."""
        if not self.on_gpu:
            return partial(tick, places)
        if self.compile:
            self.say(f"engine: compiling the step of {self.lanes} lanes, once; minutes at first, then cached")
        return capture(tick, places, self.compile, self.notes)

    def _collect(self, event: Event) -> dict[int, Trained]:
        """What each client has become, by its place in the cohort; on the host unless updates stay on the device."""
        program = self.protocol.program
        segments, stacked, losses = event
        sound = (
            _finite({name: stacked[name] for name in program.parameters})
            if self.waits and self.on_gpu
            else None
        )
        clients = fetch(stacked, self.stays)
        return {
            segment.client: Trained(
                {name: client[name] for name in program.parameters},
                {name: client[name] for name in program.buffers},
                total / max(1, segment.steps),
                segment.steps,
                sound[place] if sound is not None else None,
            )
            for place, (segment, client, total) in enumerate(
                zip(segments, clients, losses.tolist(), strict=True)
            )
        }

    def _narrow(self, size: int) -> None:
        """On a CPU, as many lanes as half of the memory holds: a GPU says itself when it has no more."""
        most = int(host_memory() / 2 / self._lane_bytes())
        if self.on_gpu or self.lanes <= most:
            return
        self.outlook = look_ahead(self.protocol, self.data, size, max(1, most))
        self._note(f"the cohort goes in waves of {self.lanes}: more lanes do not fit into half of the memory")

    def _lane_bytes(self) -> int:
        """A lane's state, its gradient, the stepped state, a correction, and the state that leaves; what it owns."""
        program = self.protocol.program
        parameters = {name: program.initial[name] for name in program.parameters}
        momentum = 2 if self.protocol.algorithm.local.momentum else 0
        owned = sum(map(nbytes, self.protocol.first(program.initial).values()))
        return (5 + momentum) * nbytes(parameters) + 3 * owned

    def _fits(self, size: int) -> bool:
        """Whether a cohort's states may wait on the device: thrice, as they leave their lanes, joined and side by side,
        and what the clients own beside them, in half of its memory."""
        program, room = self.protocol.program, room_on(self.device)
        state = {name: program.initial[name] for name in (*program.parameters, *program.buffers)}
        owned = sum(map(nbytes, self.protocol.first(program.initial).values()))
        needed = size * (3 * nbytes(state) + owned)
        if 2 * needed <= room:
            return True
        self._note(
            f"the cohort's states, {needed / 2**30:.3g} GiB with their copies, do not wait on {self.device}, which has "
            f"{room / 2**30:.3g}: they go to the host as clients end"
        )
        return False

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.say(f"engine: {text}")


def _joined(events: list[Event]) -> Event:
    """Several events as one."""
    segments, states, losses = zip(*events, strict=True)
    joined = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    return [segment for part in segments for segment in part], joined, torch.cat(losses)


def _finite(stacked: State) -> list[bool]:
    """By client: faster here, all at once, than each on the host."""
    each = [tensor.flatten(1).isfinite().all(1) for tensor in stacked.values() if tensor.is_floating_point()]
    return torch.stack(each).all(0).tolist() if each else []
