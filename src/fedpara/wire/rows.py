"""The messages of a cohort whose models lie in one matrix per type, a model per row.

`bytes` of each is what `make_message` gives on a "float32" link. In one process the messages stay joined: what they
have in common is described once, and the numbers of all models are checked at once. A message may hold
variables beside its row, such as the change of a control variate: one flat tensor for each variable and type.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedpara.layout import by_type
from fedpara.state import State, all_finite
from fedpara.wire.codec import DIGEST, Header, Message, head_of
from fedpara.wire.coded import Spec
from fedpara.wire.tensors import Entry, in_order, index_of

VARIANCE = "running_var"
"""The end of a BatchNorm variance's name."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Several messages with the names, types and shapes of `spec`."""

    spec: Spec
    blocks: State
    """[message, numbers] by type, such as "torch.float32": the model's tensors of that type, side by side by name"""
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
        return index_of(self._entries)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of one message's numbers."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.spec.values())

    @cached_property
    def finite(self) -> Sequence[bool]:
        """Whether each model has finite numbers only. Waits for the device once, unless a number is huge."""
        floats = [whole for whole in self.blocks.values() if whole.is_floating_point() and whole.numel()]
        if self.checked or not floats:
            return [True] * len(next(iter(self.blocks.values())))
        norms = torch.stack([torch.linalg.vector_norm(whole, dim=1).double() for whole in floats])
        if all(math.isfinite(total) for total in norms.sum(0).tolist()):
            return [True] * norms.shape[1]
        sound: list[bool] = torch.stack([whole.isfinite().all(1) for whole in floats]).all(0).tolist()
        return sound

    @cached_property
    def negative(self) -> Sequence[bool]:
        """Whether each model holds a negative BatchNorm variance."""
        if not any(name.endswith(VARIANCE) for name in self.spec):
            return [False] * len(self.finite)
        variances = [_flat(t) for name, t in self.cut(self.blocks).items() if name.endswith(VARIANCE)]
        found: list[bool] = (torch.cat(variances, dim=1) < 0).any(1).tolist()
        return found

    @cached_property
    def _entries(self) -> tuple[Entry, ...]:
        """The tensors of a message in the order of its data, which is also their order in a block."""
        return in_order((name, dtype, tuple(shape)) for name, (dtype, shape) in self.spec.items())

    @cached_property
    def _sizes(self) -> dict[str, list[int]]:
        """The sizes of the tensors in each block."""
        found: dict[str, list[int]] = {}
        for name, dtype, shape in self._entries:
            found.setdefault(_block_of(name, dtype), []).append(math.prod(shape))
        return found

    def cut(self, blocks: State) -> State:
        """Views of the tensors by name, in the order of the data. They keep the blocks' leading dimensions."""
        parts = {kind: iter(block.split(self._sizes[kind], dim=-1)) for kind, block in blocks.items()}
        state: State = {}
        for name, dtype, shape in self._entries:
            if (pieces := parts.get(_block_of(name, dtype))) is not None:
                part = next(pieces)
                state[name] = part.view((*part.shape[:-1], *shape))
        return state

    def row(self, row: int) -> State:
        """The blocks of one model."""
        return {kind: whole[row] for kind, whole in self.blocks.items()}


class RowMessage(Message):
    """One of the messages in `rows`. Its tensors are created only when they are read.

    `variables` holds the flat tensors beside the row, such as "control/torch.float32".
    """

    rows: Rows
    row: int
    header: Header
    """what the head was made from: a receiver in the same process need not parse it"""
    variables: State

    def __init__(self, rows: Rows, row: int, header: Header, variables: State | None = None) -> None:
        head = head_of(header, "float32", rows.index)
        vars(self).update(head=head, rows=rows, row=row, header=header, variables=variables or {})

    @property
    def blocks(self) -> State:
        return {**self.rows.row(self.row), **self.variables}

    @cached_property
    def sound(self) -> bool:
        """Whether all numbers are finite and no BatchNorm variance is negative."""
        rows, row = self.rows, self.row
        return rows.finite[row] and not rows.negative[row] and all(map(all_finite, self.variables.values()))

    @cached_property
    def tensors(self) -> State:
        return self.rows.cut(self.blocks)

    @cached_property
    def size(self) -> int:
        return len(self.head) + self.rows.nbytes + DIGEST

    @property
    def device(self) -> torch.device:
        return self.rows.device


def _block_of(name: str, dtype: torch.dtype) -> str:
    """The block of a tensor, such as "torch.float32" for the model and "control/torch.float32" for a variable."""
    variable, slash, _ = name.rpartition("/")
    return f"{variable}{slash}{dtype}"


def _flat(stacked: Tensor) -> Tensor:
    """[message, numbers]"""
    return stacked.reshape(len(stacked), stacked[0].numel())
