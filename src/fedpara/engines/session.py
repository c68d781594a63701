"""Session: what the server and its clients agree on before the first message."""

from dataclasses import dataclass, replace
from functools import cached_property

from fedpara.algorithms import Algorithm, Variables
from fedpara.algorithms.optimizers import Slots, build_optimizer
from fedpara.engines.distributed.process_group import join
from fedpara.engines.program import Program
from fedpara.engines.setup.rotation import Rotation
from fedpara.privacy import Privacy, User
from fedpara.privacy.randomness import fresh_key
from fedpara.state import State
from fedpara.wire import AnyMessage, Header, Link, Spec, admit, pack, spec_of, unpack

PRIVATE = "private"
"""The name under which a client's memory holds its private parameters, beside the algorithm's variables."""
SLOT = "optimizer."
"""The prefix of the names under which it holds the optimizer's slots, if they are kept."""
PERSONAL = "personal"
"""The name under which it holds the personal model, if the algorithm has one; its slots have `PERSONAL_SLOT`."""
PERSONAL_SLOT = f"{PERSONAL}.{SLOT}"
_SLOTS = (SLOT, PERSONAL_SLOT)


@dataclass(frozen=True)
class Session:
    program: Program
    algorithm: Algorithm
    link: Link
    seed: int
    privacy: Privacy | None = None
    rotation: Rotation | None = None
    privacy_seed: int | None = None  # of the noise; None takes it from the operating system

    def __repr__(self) -> str:
        link = f"{self.link.down} down, {self.link.up} up"
        return f"Session({self.algorithm.name}, {self.program.scheme}, seed {self.seed}, link: {link})"

    @cached_property
    def down(self) -> Spec:
        """Names, types and shapes of the server's messages."""
        a, model = self.algorithm, self._model()
        broadcast = a.broadcast(a.server_init(self._x()))
        return spec_of(pack({"": model, **broadcast}), self.link.down, self.exact)

    @cached_property
    def up(self) -> Spec:
        """Names, types and shapes of a client's messages."""
        a, x = self.algorithm, self._x()
        extra, _ = a.finish(x, x, a.broadcast(a.server_init(x)), a.client_init(x), 1, 1.0)
        return spec_of(pack({"": self._model(), **extra}), self.link.up, self.exact)

    def up_in(self, round: int) -> Spec:
        """The same for one round: factors that rest are not sent."""
        resting = self.resting(round)
        return {name: one for name, one in self.up.items() if name not in resting}

    def resting(self, round: int) -> frozenset[str]:
        """The tensors of the model that neither train nor travel up in this round."""
        return frozenset() if self.rotation is None else self.rotation.resting(round)

    def _x(self) -> State:
        return self.program.start(self.program.shared)

    def _model(self) -> State:
        return {**self._x(), **self.program.start(self.program.shared_buffers)}

    @property
    def exact(self) -> frozenset[str]:
        """The names that every link sends unchanged: the buffers."""
        return frozenset(self.program.shared_buffers)

    def read_down(self, message: AnyMessage, round: int) -> tuple[State, Variables]:
        """(the model as every client sees it, in the model's own types; the algorithm's variables)"""
        _, state = admit(
            message,
            spec=self.down,
            round=round,
            method=self.algorithm.name,
            scheme=self.program.scheme,
            link=self.link.down,
            exact=self.exact,
        )
        initial = self.program.initial
        variables = {
            variable: {
                name: t.to(initial[name].dtype) if name in initial else t for name, t in tensors.items()
            }
            for variable, tensors in unpack(state).items()
        }
        model = variables.pop("")
        return model, variables if self.rotation is None else {**variables, **self.rotation.turn(round)}

    def first_memory(self, model: State) -> Variables:
        """A client's memory before its first round."""
        x = {name: model[name] for name in self.program.shared}
        private = self.program.start(self.program.retained)
        memory = {PRIVATE: private, **self.algorithm.client_init(x)}
        parameters = {**self.program.start(self.program.parameters), **x}
        for session, prefix in zip(self.trainings, _SLOTS, strict=False):
            local = session.algorithm.local
            if local.keep_optimizer:
                memory |= named_slots(build_optimizer(local).init(parameters), prefix)
        if self.algorithm.personal is not None:
            memory[PERSONAL] = {**self.program.start(self.program.buffers), **parameters}
            memory[PERSONAL] |= {name: model[name] for name in self.program.buffers if name in model}
        return memory

    @cached_property
    def trainings(self) -> tuple["Session", ...]:
        """The trainings of a client in a round: of the server's model, and of its personal one if there is one."""
        own = self.algorithm.of_personal
        return (self,) if own is None else (self, replace(self, algorithm=own))

    @property
    def extras(self) -> bool:
        """Whether clients send more than the model."""
        return len(self.up) > len(self.program.shared) + len(self.program.shared_buffers)

    @property
    def updates_may_stay(self) -> bool:
        """Whether updates can be checked and aggregated on a GPU. Memories and lossy links need the host."""
        return not self.stateful and not self.extras and self.link == Link() and self.algorithm.on_any_device

    @cached_property
    def stateful(self) -> bool:
        """Whether clients keep anything between rounds."""
        return any(self.first_memory(self._x()).values())

    @cached_property
    def cohort_seed(self) -> int:
        """Decides the cohorts. User-level privacy draws a secret one in every process: known cohorts hide less."""
        if not isinstance(self.privacy, User) or self.privacy_seed is not None:
            return self.seed
        return int(join().agreed("the secret of the cohorts", fresh_key().hex())[:15], 16)

    def header(self, round: int, sender: str = "server", examples: int = 0) -> Header:
        return Header(round, self.algorithm.name, self.program.scheme, sender, examples)


def named_slots(slots: Slots, prefix: str = SLOT) -> Variables:
    """The optimizer's slots by their names in a client's memory."""
    return {prefix + name: state for name, state in slots.items()}


def memory_of(memory: Variables, training: int) -> Variables:
    """What one of the `trainings` reads of a client's memory. The second one starts from the whole personal model."""
    own = {name: state for name, state in memory.items() if name != PERSONAL and not name.startswith(_SLOTS)}
    prefix = _SLOTS[training]
    slots = {name.removeprefix(prefix): s for name, s in memory.items() if name.startswith(prefix)}
    return {**own, **({PRIVATE: memory[PERSONAL]} if training else {}), **named_slots(slots)}


def own_part(memory: Variables) -> State:
    """The client's part of its own model: its private parameters, or the whole of its personal model."""
    return {**memory.get(PRIVATE, {}), **memory.get(PERSONAL, {})}
