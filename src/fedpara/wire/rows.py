"""The messages of a cohort whose tensors lie in one matrix per type, a message per row.

`bytes` of each is what `make_message` gives on a "float32" link. In one process nothing is taken apart: what the
messages have in common is described once, and the numbers of all of them are checked at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedpara.layout import by_type
from fedpara.state import State
from fedpara.wire.codec import DIGEST, Header, Message, head_of
from fedpara.wire.coded import Spec
from fedpara.wire.tensors import in_order, index_of

VARIANCE = "running_var"
"""The end of a BatchNorm variance's name."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Several messages of the same names, types and shapes, which `spec` gives."""

    spec: Spec
    blocks: State
    """[message, numbers] by type, such as "torch.float32": the tensors of that type side by side, by their names"""
    checked: bool = False
    """whether all numbers are known to be finite"""

    @classmethod
    def of(cls, stacked: Mapping[str, Tensor], spec: Spec) -> "Rows":
        """From tensors [message, ...] of the types in `spec`."""
        groups = by_type(stacked)
        joined = (torch.cat([_flat(stacked[name]) for name in names], dim=1) for names in groups)
        return cls(spec, {str(whole.dtype): whole for whole in joined})

    @cached_property
    def device(self) -> torch.device:
        return next(iter(self.blocks.values())).device

    @cached_property
    def index(self) -> bytes:
        return index_of(in_order((name, dtype, tuple(shape)) for name, (dtype, shape) in self.spec.items()))

    @cached_property
    def nbytes(self) -> int:
        """The bytes of one message's numbers."""
        return sum(whole.shape[1] * whole.element_size() for whole in self.blocks.values())

    @cached_property
    def finite(self) -> Sequence[bool]:
        """Whether each message is without NaN and infinity. Waits for the device once, unless a number is huge."""
        floats = [whole for whole in self.blocks.values() if whole.is_floating_point() and whole.numel()]
        if self.checked or not floats:
            return [True] * len(next(iter(self.blocks.values())))
        squares = torch.stack(
            [torch.stack([torch.dot(row, row) for row in whole]).double() for whole in floats]
        )
        if all(math.isfinite(total) for total in squares.sum(0).tolist()):
            return [True] * squares.shape[1]
        sound: list[bool] = torch.stack([whole.isfinite().all(1) for whole in floats]).all(0).tolist()
        return sound

    @cached_property
    def negative(self) -> Sequence[bool]:
        """Whether each message holds a negative BatchNorm variance."""
        if not any(name.endswith(VARIANCE) for name in self.spec):
            return [False] * len(self.finite)
        variances = [_flat(t) for name, t in self.cut(self.blocks).items() if name.endswith(VARIANCE)]
        found: list[bool] = (torch.cat(variances, dim=1) < 0).any(1).tolist()
        return found

    @cached_property
    def _order(self) -> dict[str, list[tuple[str, torch.Size]]]:
        """The tensors of each type, as they lie in a block; all together in the order of a message's data."""
        found: dict[str, list[tuple[str, torch.Size]]] = {}
        for name, dtype, shape in in_order((name, *kind) for name, kind in self.spec.items()):
            found.setdefault(str(dtype), []).append((name, torch.Size(shape)))
        return found

    def cut(self, blocks: State) -> State:
        """The tensors by their names, as views, in the order of the data. Leading dimensions of the blocks stay."""
        state: State = {}
        for kind, tensors in self._order.items():
            parts = blocks[kind].split([shape.numel() for _, shape in tensors], dim=-1)
            state |= {
                name: part.view((*part.shape[:-1], *shape))
                for (name, shape), part in zip(tensors, parts, strict=True)
            }
        return state

    def row(self, row: int) -> State:
        """The blocks of one message."""
        return {kind: whole[row] for kind, whole in self.blocks.items()}


class RowMessage(Message):
    """One of the messages in `rows`. Its tensors are cut out only if they are read."""

    rows: Rows
    row: int

    def __init__(self, rows: Rows, row: int, header: Header) -> None:
        vars(self).update(head=head_of(header, "float32", rows.index), rows=rows, row=row)

    @cached_property
    def tensors(self) -> State:
        return self.rows.cut(self.rows.row(self.row))

    @cached_property
    def size(self) -> int:
        return len(self.head) + self.rows.nbytes + DIGEST

    @property
    def device(self) -> torch.device:
        return self.rows.device


def _flat(stacked: Tensor) -> Tensor:
    """[message, numbers]"""
    return stacked.reshape(len(stacked), stacked[0].numel())
