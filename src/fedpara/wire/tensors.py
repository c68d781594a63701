"""The tensors of a message, as safetensors bytes: u64 length, JSON index, data.

The encoding is canonical: widest type first (so that every tensor is aligned), then by name, without gaps. A reader
rebuilds the index from the names, types and shapes it read, and compares the bytes. This one comparison detects false
offsets, gaps, overlaps, repeated names and unknown fields.

`safetensors.torch.save` would copy the data twice. This module copies it once, into the message, or not at all.
"""

import json
import math
import reprlib
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch

from fedpara.errors import WireError
from fedpara.layout import by_type, cut, flat, runs
from fedpara.state import State

MAX_INDEX = 8 << 20
MAX_DIMENSIONS = 16
MAX_NUMBERS = 1 << 48
CACHED_INDEX = 256 << 10
FEW = 8
"""The largest number of memory blocks of a state. More are joined, because a state is read more than once."""

# In the order of the data, widest first.
_CODES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_PLACE = {dtype: place for place, dtype in enumerate(_CODES)}

Entry = tuple[str, torch.dtype, tuple[int, ...]]
_compact = json.JSONEncoder(separators=(",", ":"))


def lay_out(state: State) -> tuple[bytes, State]:
    """The index with its length, and the tensors in its order: contiguous, on their device."""
    entries = in_order((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items())
    return index_of(entries), {name: state[name].contiguous() for name, _, _ in entries}


def index_of(entries: tuple[Entry, ...]) -> bytes:
    """The index of these tensors, which are `in_order`, with its length before it."""
    index, _ = _index(entries)
    if len(index) > MAX_INDEX:
        raise WireError(f"the index of {len(entries)} tensors takes {len(index)} bytes: at most {MAX_INDEX}.")
    return len(index).to_bytes(8, "little") + index


def in_order(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The tensors in the order of a message's data."""
    return tuple(sorted(entries, key=lambda entry: (_PLACE.get(entry[1], -1), entry[0])))


def side_by_side(tensors: State) -> State:
    """The tensors in at most `FEW` blocks of memory. Copied to one block per type if there are more."""
    if len(runs(list(tensors.values()))) <= FEW:
        return tensors
    joined: State = {}
    for names in by_type(tensors):
        joined |= cut(flat(tensors, names), tensors, names)
    return {name: joined[name] for name in tensors}


def memory(tensors: State) -> tuple[memoryview, ...]:
    """The bytes of the data, without a copy if possible."""
    # `runs` gives stride 1: reshape(-1) would keep the odd stride that a single number may have.
    return tuple(t.cpu().view(torch.uint8).numpy().data for t in runs(list(tensors.values())))


def split_index(payload: memoryview) -> tuple[bytes, memoryview]:
    """The index and the data after it. WireError if the claimed length of the index exceeds the payload."""
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or length > min(MAX_INDEX, len(payload) - 8):
        raise WireError(
            f"the tensors' index claims {length} bytes: expected at most {max(0, min(MAX_INDEX, len(payload) - 8))}."
        )
    return bytes(payload[8 : 8 + length]), payload[8 + length :]


def read(index: bytes, data: memoryview) -> State:
    """The tensors; those of one type are adjacent in memory. WireError if `lay_out` could not have written them.

    Read-only data is copied, because torch may write to it. NumPy's copy does not block other threads.
    """
    entries, ends = (_parsed if len(index) > CACHED_INDEX else _parsed_before)(index)
    if len(data) != (ends[-1] if ends else 0):
        raise WireError(f"the tensors hold {len(data)} bytes: expected {ends[-1] if ends else 0}.")
    numbers = np.frombuffer(data, np.uint8)
    if data.readonly:
        numbers = np.concatenate([numbers])
    state: State = {}
    for dtype, alike in groupby(range(len(entries)), key=lambda i: entries[i][1]):
        these = list(alike)
        sizes = [ends[i] - (ends[i - 1] if i else 0) for i in these]
        part = numbers[ends[these[0]] - sizes[0] : ends[these[-1]]]
        if dtype == torch.bool and len(part) and part.max() > 1:
            raise WireError("a boolean tensor holds other bytes than 0 and 1.")
        of_type = torch.from_numpy(part).view(dtype) if len(part) else torch.empty(0, dtype=dtype)
        for i, piece in zip(these, of_type.split([size // dtype.itemsize for size in sizes]), strict=True):
            state[entries[i][0]] = piece.view(entries[i][2])
    return state


def data_length(index: bytes) -> int:
    """The bytes of data that follow an index. WireError if `lay_out` could not have written it."""
    _, ends = (_parsed if len(index) > CACHED_INDEX else _parsed_before)(index)
    return ends[-1] if ends else 0


def shown(value: object) -> str:
    """Untrusted input for an error message: escaped and shortened, without building its full repr."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring = 2, 80
    text = short.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def in_one_line(text: str, most: int = 300) -> str:
    """Untrusted text for a log: shortened, and escaped so that it cannot break a line or move the cursor."""
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def as_json(value: dict[str, object]) -> bytes:
    return _compact.encode(value).encode()


def parse_json(raw: bytes, what: str) -> dict[str, object]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"the {what} is not JSON: {shown(str(error))}.") from error
    if not isinstance(value, dict):
        raise WireError(f"the {what} is {shown(value)}: expected a JSON object.")
    return value


def _entries(raw: bytes) -> Iterable[Entry]:
    for name, entry in parse_json(raw, "tensors' index").items():
        code = entry.get("dtype") if isinstance(entry, dict) else None
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(code, str) or code not in _DTYPES:
            raise WireError(f"tensor {shown(name)} has type {shown(code)}: expected {', '.join(_DTYPES)}.")
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise WireError(f"tensor {shown(name)} has shape {shown(shape)}: expected a list of integers.")
        yield name, _DTYPES[code], tuple(shape)


def _parsed(raw: bytes) -> tuple[tuple[Entry, ...], tuple[int, ...]]:
    """The tensors of an index, and where the data of each one ends."""
    entries = in_order(_entries(raw))
    index, ends = (_described if len(raw) > CACHED_INDEX else _index)(entries)
    if index != raw:
        raise WireError("the tensors' index is not canonical: expected each name once, without gaps.")
    return entries, ends


# All messages of a federation have one or two different indices. A hostile message can only evict them.
_parsed_before = lru_cache(maxsize=32)(_parsed)


def _described(entries: tuple[Entry, ...]) -> tuple[bytes, tuple[int, ...]]:
    """The index padded to a multiple of 8 bytes, and where each tensor's data ends."""
    described: dict[str, object] = {}
    ends: list[int] = []
    start = 0
    for name, dtype, shape in entries:
        if name == "__metadata__":
            raise WireError("a tensor is named '__metadata__': safetensors reserves this name. Rename it.")
        if dtype not in _CODES:
            raise WireError(f"tensor {shown(name)} has type {dtype}: expected {', '.join(map(str, _CODES))}.")
        # An empty tensor counts by its other sizes, which torch multiplies for the strides.
        if (
            len(shape) > MAX_DIMENSIONS
            or not all(0 <= size <= MAX_NUMBERS for size in shape)
            or math.prod(max(size, 1) for size in shape) > MAX_NUMBERS
        ):
            raise WireError(
                f"tensor {shown(name)} has shape {shown(shape)}: expected at most {MAX_DIMENSIONS} "
                f"dimensions, none negative, and {MAX_NUMBERS} numbers."
            )
        end = start + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        ends.append(end)
        start = end
    text = as_json(described)
    return text + b" " * (-len(text) % 8), tuple(ends)


_index = lru_cache(maxsize=32)(_described)
