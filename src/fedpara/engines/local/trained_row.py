"""TrainedRow: a trained client whose state is a row of `Rows`, cut into tensors only if they are read.

The algorithm's `finish` then computes with flat tensors, one per type (`layout.joined`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedpara.algorithms import Variables
from fedpara.algorithms.core import no_variables
from fedpara.algorithms.elementwise import on_blocks
from fedpara.engines.local.worker import Trained
from fedpara.engines.session import Session
from fedpara.layout import joined, separated
from fedpara.state import State
from fedpara.wire import Header, Spec
from fedpara.wire.rows import RowMessage, Rows


@dataclass(frozen=True, eq=False)
class Start:
    """What the clients of a round start from, on one device: their flat tensors are made once for all clients."""

    session: Session
    model: State
    down: Variables

    @cached_property
    def x(self) -> State:
        """The model's shared parameters."""
        return {name: self.model[name] for name in self.session.program.shared}

    @cached_property
    def blocks(self) -> tuple[State, Variables]:
        """x and the variables, each as flat tensors."""
        return joined(self.x), {name: joined(state) for name, state in self.down.items()}


class TrainedRow(Trained):
    rows: Rows
    row: int
    session: Session

    def __init__(self, session: Session, rows: Rows, row: int, loss: float, steps: int) -> None:
        # None: the caller then checks the parameters alone, without the buffers.
        finite = True if rows.finite[row] else None
        vars(self).update(
            session=session, rows=rows, row=row, loss=loss, steps=steps, finite=finite, slots={}
        )

    @cached_property
    def state(self) -> State:
        return self.rows.cut(self.rows.row(self.row))

    @cached_property
    def parameters(self) -> State:
        return {name: self.state[name] for name in self.session.program.parameters}

    @cached_property
    def buffers(self) -> State:
        return {name: self.state[name] for name in self.session.program.buffers}

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def reply(
        self, header: Header, start: Start, client: Variables, eta: float
    ) -> tuple[RowMessage, Variables]:
        """(the client's message, its new variables)"""
        finish = on_blocks(self.session.algorithm.finish)
        assert finish is not None  # `Session.sends_trained`
        if finish is no_variables:
            return RowMessage(self.rows, self.row, header), {}
        y, (x, down) = self.rows.row(self.row), start.blocks
        own_blocks = {name: joined(state) for name, state in client.items()}
        extra, own = finish(x, y, down, own_blocks, self.steps, eta)
        sent = {f"{name}/{kind}": block for name, part in extra.items() for kind, block in part.items()}
        kept = {name: separated(part, start.x) for name, part in own.items()}
        return RowMessage(self.rows, self.row, header, sent), kept


def as_row(session: Session, trained: Trained) -> Trained:
    """The trained client as a row, if it stays on a GPU and is sent as it is."""
    if not trained.blocks or not session.sends_trained:
        return trained
    if not _is_model(session, {name: (tensor.dtype, tensor.shape) for name, tensor in trained.state.items()}):
        return trained
    blocks = {kind: block[None] for kind, block in trained.blocks.items()}
    rows = Rows(session.up, blocks, checked=bool(trained.finite))
    return TrainedRow(session, rows, 0, trained.loss, trained.steps)


def in_rows(session: Session, stacked: Mapping[str, Tensor]) -> Rows | None:
    """Trained states [client, ...] as the rows that they are sent as. None if what is sent is computed from them."""
    if not session.sends_trained:
        return None
    spec = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in stacked.items()}
    return Rows.of(stacked, session.up) if _is_model(session, spec) else None


def _is_model(session: Session, spec: Spec) -> bool:
    """Whether these are the model's tensors as they are sent."""
    return spec == {name: kind for name, kind in session.up.items() if "/" not in name}
