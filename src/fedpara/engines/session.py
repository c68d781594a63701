"""Session: what the server and its clients agree on before the first message."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fedpara.algorithms import Algorithm, Variables
from fedpara.algorithms.core import as_trained, no_variables
from fedpara.algorithms.elementwise import on_blocks
from fedpara.algorithms.optimizers import Slots, build_optimizer
from fedpara.engines.differences import Differences
from fedpara.engines.distributed.process_group import join
from fedpara.engines.program import Program
from fedpara.engines.setup.folding import Folding, OntoBase
from fedpara.engines.setup.recycling import Recycling
from fedpara.engines.setup.rotation import Rotation
from fedpara.errors import WireError
from fedpara.privacy import Privacy, User
from fedpara.privacy.randomness import fresh_key
from fedpara.state import State
from fedpara.wire import AnyMessage, Header, Link, Spec, admit, pack, spec_of, split_messages, unpack
from fedpara.wire.codec import header_of
from fedpara.wire.encoders import Encoding
from fedpara.wire.encoders.grid import EXACT

PRIVATE = "private"
"""The name under which a client's memory holds its private parameters, beside the algorithm's variables."""
SLOT = "optimizer."
"""The prefix of the names under which a client's memory holds the optimizer's slots, if they are kept."""
PERSONAL = "personal"
"""The name under which a client's memory holds its personal model. The model's slots have `PERSONAL_SLOT`."""
PERSONAL_SLOT = f"{PERSONAL}.{SLOT}"
RESIDUE = "link.residue"
"""The name under which a client's memory holds what its messages left out, if the uplink has error feedback."""
KNOWN = "link.known"
"""The name under which a Flower node holds a client's x^ (`differences.py`). In one process all share one."""
FOLDED = "base"
"""The name under which a Flower node holds a client's base (`setup/folding.py`)."""
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
    folding: Folding | None = None
    recycling: Recycling | None = None

    def __repr__(self) -> str:
        link = f"{self.link.down} down, {self.link.up} up"
        return f"Session({self.algorithm.name}, {self.program.scheme}, seed {self.seed}, link: {link})"

    @cached_property
    def down(self) -> Spec:
        """Names, types and shapes of the server's messages."""
        return spec_of(self._first_broadcast(), self.link.downlink.text, self.exact)

    @cached_property
    def up(self) -> Spec:
        """Names, types and shapes of a client's messages."""
        a, x = self.algorithm, self._x()
        extra, _ = a.finish(x, x, a.broadcast(a.server_init(x)), a.client_init(x), 1, 1.0)
        return spec_of(pack({"": self._model(), **extra}), self.link.uplink.text, self.exact)

    def _first_broadcast(self) -> State:
        a = self.algorithm
        return pack({"": self._model(), **a.broadcast(a.server_init(self._x()))})

    def first_known(self) -> State:
        """x^_0 of `differences.py`: the initial values of the tensors that the downlink encodes with loss."""
        state, grid = self._first_broadcast(), self.link.downlink.grid
        known = {name: state[name].float() for name in self._lossy(self.link.downlink, self.down)}
        if grid is None:
            return known
        return dict(zip(known, grid.at(0).rounded(list(known.values())), strict=True))

    def _lossy(self, encoding: Encoding, spec: Spec) -> list[str]:
        """The names of the tensors that the encoding may change."""
        return [name for name, kind in spec.items() if name not in self.exact and encoding.loses(*kind)]

    def down_in(self, round: int) -> Spec:
        """The spec of the server's message in one round: factors that both ends draw are not sent."""
        left_out = self.left_out(round)
        return {name: one for name, one in self.down.items() if name not in left_out}

    def left_out(self, round: int) -> frozenset[str]:
        """The tensors of the model that both ends know without a message in this round."""
        folding = self.folding
        return folding.factors if folding is not None and folding.restarts(round) else frozenset()

    @cached_property
    def beside(self) -> tuple[str, ...]:
        """Frozen tensors that a composed weight reads and no form holds: fixed factors, and a folding run's base."""
        names = self.folding.first() if self.folding is not None else self.program.fixed
        return tuple(names)

    @cached_property
    def entered(self) -> tuple[str, ...]:
        """With `distill`, the tensors of the received model that differ between clients, or change as it trains."""
        program = self.program
        return () if self.algorithm.distill is None else (*sorted(program.private), *program.buffers)

    def up_in(self, round: int, variables: Variables) -> Spec:
        """The spec of a client's message in this round: `up` without the tensors that are not sent."""
        unsent = self.unsent(round, variables)
        return {name: one for name, one in self.up.items() if name not in unsent}

    def unsent(self, round: int, variables: Variables) -> frozenset[str]:
        """The names of the model's tensors that clients do not send in this round: resting factors and recycled layers.

        `variables` are the server's, or those of its message.
        """
        recycled = frozenset() if self.recycling is None else self.recycling.skipped(variables)
        return self.resting(round) | recycled

    def resting(self, round: int) -> frozenset[str]:
        """The names of the model's tensors that are neither trained nor sent in this round."""
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
        if isinstance(message, Differences):  # in one process: the server has added them up
            return self.as_model(message.received, round)
        model, variables = self.as_model(self.admit_down(message, round, self.link.down), round)
        return {**model, **message.beside} if isinstance(message, OntoBase) else model, variables

    def admit_down(self, message: AnyMessage, round: int, link: str, since: int | None = None) -> State:
        """The state in a message of the server, after checking it."""
        _, state = admit(
            message,
            spec=self.down_in(round),
            round=round,
            method=self.algorithm.name,
            scheme=self.program.scheme,
            link=link,
            exact=self.exact,
            since=since,
        )
        return state

    def admit_move(self, message: AnyMessage, round: int, since: int) -> State:
        """x^_round - x^_since on a grid, with the tensors that every message holds in full."""
        return self.admit_down(message, round, EXACT, since)

    def add_differences(self, body: bytes, round: int, known: State | None, since: int) -> State:
        """x^_round from x^_since and the messages of all later rounds, or from one copy.

        On a grid one message may span several rounds.
        """
        messages = split_messages(body)
        if len(messages) == 1 and header_of(messages[0])[1] == "float32":
            return self.admit_down(messages[0], round, "float32")
        known, at = self.first_known() if known is None else known, since
        for message in messages:
            if self.link.downlink.grid is None:
                at, change = at + 1, self.admit_down(message, at + 1, self.link.down)
            else:
                to = header_of(message)[0].round
                at, change = to, self.admit_move(message, to, at)
            state = self.plus(known, change)
            known = {name: state[name] for name in known}
        if not messages or at != round:
            raise WireError(
                f"{len(messages)} messages lead from round {since} to {at}: expected round {round}."
            )
        return state

    @cached_property
    def copied(self) -> Spec:
        """The spec of a copy of the base, in a run that folds."""
        names = self.folding.bases if self.folding is not None else ()
        return spec_of({name: self.program.initial[name] for name in names})

    def add_folds(
        self, body: bytes, round: int, base: State | None, since: int
    ) -> tuple[tuple[State, Variables], State]:
        """(what `read_down` gives, the base) of a client whose base has the folds up to the end of round `since`."""
        folding, initial = self.folding, self.program.initial
        assert folding is not None
        *way, own = split_messages(body) or [b""]
        done, folds = since // folding.every, folding.folds(round)
        bases = {name: initial[name] for name in folding.bases} if base is None else base
        if len(way) == 1 and header_of(way[0])[0].round == round:
            bases = self._admit(way[0], self.copied, round, "float32")
            done = folds
        elif len(way) != folds - done:
            raise WireError(f"{len(way)} folds: expected numbers {done + 1} to {folds}.")
        factors = {name: initial[name] for name in sorted(folding.factors)}
        spec = spec_of(factors, self.link.downlink.text)
        for fold, message in enumerate(way[: folds - done], done + 1):
            received = self._admit(message, spec, fold * folding.every, self.link.down)
            bases = folding.folded({**folding.start(fold - 1), **bases}, received)
        model, variables = self.read_down(own, round)
        return ({**model, **folding.beside(bases, round)}, variables), bases

    def _admit(self, message: bytes, spec: Spec, round: int, link: str) -> State:
        """The tensors of a message, after checking them, in the model's own types."""
        method, scheme = self.algorithm.name, self.program.scheme
        _, state = admit(message, spec=spec, round=round, method=method, scheme=scheme, link=link)
        return {name: tensor.to(self.program.initial[name]) for name, tensor in state.items()}

    def plus(self, known: State, difference: State) -> State:
        """x^ + what a message decodes to; tensors that every message holds in full replace the old ones."""
        return {name: known[name] + t if name in known else t for name, t in difference.items()}

    def as_model(self, state: State, round: int) -> tuple[State, Variables]:
        """(the model, the algorithm's variables) as a client reads them from the server's state."""
        initial = self.program.initial
        variables = {
            variable: {
                name: t.to(initial[name].dtype) if name in initial else t for name, t in tensors.items()
            }
            for variable, tensors in unpack(state).items()
        }
        model = variables.pop("", {})
        return model, variables if self.rotation is None else {**variables, **self.rotation.turn(round)}

    def first_memory(self, model: State) -> Variables:
        """A client's memory before its first round."""
        x = {name: model[name] for name in self.program.shared}
        private = self.program.start(self.program.retained)
        memory = {PRIVATE: private, **self.algorithm.client_init(x)}
        if self.link.uplink.feedback:
            lossy = self._lossy(self.link.uplink, self.up)
            memory[RESIDUE] = {name: torch.zeros(self.up[name][1]) for name in lossy}
        kept = [session.algorithm.local.keep_optimizer for session in self.trainings]
        if not any(kept) and self.algorithm.personal is None:
            return memory
        parameters = {**self.program.start(self.program.parameters), **x}
        for session, keeps, prefix in zip(self.trainings, kept, _SLOTS, strict=False):
            if keeps:
                memory |= named_slots(build_optimizer(session.algorithm.local).init(parameters), prefix)
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

    @cached_property
    def stateful(self) -> bool:
        """Whether clients keep anything between rounds."""
        return any(self.first_memory(self._x()).values())

    @cached_property
    def sends_trained(self) -> bool:
        """Whether a client sends exactly what it trained, in every round.

        It may also send and keep variables that are computed from it number by number.
        """
        algorithm, unsent = self.algorithm, self.rotation is not None or self.recycling is not None
        if algorithm.send is not as_trained or unsent or isinstance(self.privacy, User):
            return False
        nothing = algorithm.finish is no_variables and not self.stateful
        return self.link.uplink.text == "float32" and (nothing or self._finishes_in_blocks())

    def _finishes_in_blocks(self) -> bool:
        """Whether all client variables have the shapes of x, and `finish` computes them number by number."""
        a, x = self.algorithm, self._x()
        first, own, down = self.first_memory(x), a.client_init(x), a.broadcast(a.server_init(x))
        others = any(first[name] for name in first.keys() - own.keys())
        if on_blocks(a.finish) is None or self.program.shared_buffers or others:
            return False
        spec = spec_of(x)
        states = [
            state for part in (own, down, *a.finish(x, x, down, own, 1, 1.0)) for state in part.values()
        ]
        return all(spec_of(state) == spec for state in states)

    @cached_property
    def differences(self) -> bool:
        """Whether the server sends differences (`differences.py`)."""
        downlink = self.link.downlink
        return downlink.sends_differences and bool(self._lossy(downlink, self.down))

    @property
    def on_nodes(self) -> bool:
        """Whether Flower's nodes store anything between rounds."""
        return self.stateful or self.differences or self.folding is not None

    @cached_property
    def cohort_seed(self) -> int:
        """The seed of the cohorts.

        User-level privacy with secret noise draws a fresh secret at every start, because its cost assumes that the
        cohorts are unknown.
        """
        if not isinstance(self.privacy, User) or self.privacy_seed is not None:
            return self.seed
        return int(join().agreed("the secret of the cohorts", fresh_key().hex())[:15], 16)

    def header(
        self, round: int, sender: str = "server", examples: int = 0, since: int | None = None
    ) -> Header:
        return Header(round, self.algorithm.name, self.program.scheme, sender, examples, since)


def named_slots(slots: Slots, prefix: str = SLOT) -> Variables:
    """The optimizer's slots by their names in a client's memory."""
    return {prefix + name: state for name, state in slots.items()}


def memory_of(memory: Variables, training: int) -> Variables:
    """The part of a client's memory that one of the `trainings` reads. The second starts from the personal model."""
    rest = (PERSONAL, RESIDUE)
    own = {name: state for name, state in memory.items() if name not in rest and not name.startswith(_SLOTS)}
    prefix = _SLOTS[training]
    slots = {name.removeprefix(prefix): s for name, s in memory.items() if name.startswith(prefix)}
    return {**own, **({PRIVATE: memory[PERSONAL]} if training else {}), **named_slots(slots)}


def own_part(memory: Variables) -> State:
    """The client's part of its own model: its private parameters, or the whole of its personal model."""
    return {**memory.get(PRIVATE, {}), **memory.get(PERSONAL, {})}
