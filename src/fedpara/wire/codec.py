"""The message format: "FPM1" | u32 length | JSON header | safetensors bytes | sha256 of all before it, cut to 128 bits.

Numbers are little-endian. The digest detects damage, not forgery: anyone who can write a message can write its digest.
The transport authenticates the peer (TLS, node keys), and `check.admit` checks the content.
Equal content gives equal bytes, and `decode` raises WireError for any other bytes. It checks every length against the
size of the message before it reads, and unpickles nothing.

Inside one process a message stays a `Message`: its tensors are read in place, on their device, and its bytes and digest
are computed only on request.
"""

import re
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256

import torch

from fedpara.errors import UsageError, WireError
from fedpara.state import State, device_of, nbytes
from fedpara.wire.coded import Spec, pack_coded, read_coded
from fedpara.wire.encoders.rounding import PRECISIONS, dequantize, quantize
from fedpara.wire.link import parse_encoding
from fedpara.wire.tensors import (
    as_json,
    data_length,
    lay_out,
    memory,
    parse_json,
    read,
    shown,
    side_by_side,
    split_index,
)

MAGIC = b"FPM1"
MAX_HEADER = 64 << 10
DIGEST = 16

# Sent with int8 tensors: one scale per tensor of that type, in the order of the names; 0 if it was int8 before.
_SCALES = "__scales__"
_SENDER = re.compile(r"server|client:(0|[1-9][0-9]{0,17})")
_EXACT = (torch.float32, torch.float64)
_FLOATS = {
    "float32": _EXACT,
    "float16": (torch.float16,),
    "bfloat16": (torch.bfloat16,),
    "int8": (),
}


@dataclass(frozen=True)
class Header:
    round: int
    method: str
    scheme: str
    sender: str = "server"  # or "client:17"
    examples: int = 0
    since: int | None = None
    """The round whose state the message adds to; None, and not in the header, if it is the round before."""

    def __post_init__(self) -> None:
        numbers = {"round": self.round, "examples": self.examples}
        for name, value in (numbers if self.since is None else {**numbers, "since": self.since}).items():
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise WireError(f"header field {name} is {shown(value)}: expected an integer, 0 to 2^63 - 1.")
        for name in ("method", "scheme", "sender"):
            if not isinstance(getattr(self, name), str):
                raise WireError(f"header field {name} is {shown(getattr(self, name))}: expected text.")
        if not _SENDER.fullmatch(self.sender):
            raise WireError(
                f"header field sender is {shown(self.sender)}: expected 'server' or a client, such as 'client:17'."
            )


_FIELDS = [*(field.name for field in fields(Header) if field.name != "since"), "dtype"]


@dataclass(frozen=True, eq=False)
class Message:
    """A message inside one process. `bytes(message)` is its encoding, and `len(message)` the encoding's length.

    Sender and receiver share the tensors: neither may write to them.
    """

    head: bytes  # everything before the data
    tensors: State  # in the order of the data

    @cached_property
    def joined(self) -> State:
        """The tensors in a few blocks of memory, cached because they are read more than once."""
        return side_by_side(self.tensors)

    @cached_property
    def size(self) -> int:
        return len(self.head) + nbytes(self.tensors) + DIGEST

    @property
    def device(self) -> torch.device:
        return device_of([self.tensors])

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        pieces: list[bytes | memoryview] = [self.head, *memory(self.tensors)]
        digest = sha256()
        for piece in pieces:
            digest.update(piece)
        return b"".join([*pieces, digest.digest()[:DIGEST]])


AnyMessage = bytes | Message


def encode(
    state: State, header: Header, dtype: str = "float32", generator: torch.Generator | None = None
) -> bytes:
    return bytes(make_message(state, header, dtype, generator))


def make_message(
    state: State,
    header: Header,
    dtype: str = "float32",
    generator: torch.Generator | None = None,
    exact: frozenset[str] = frozenset(),
) -> Message:
    """A message in the link's encoding `dtype` (`link.py`). Names in `exact` are sent as on a "float32" link.

    A "float32" link sends float32 and float64 exactly. Links below 16 bits draw from `generator`, in the order of the
    names.
    """
    encoding = parse_encoding(dtype, "dtype")
    if _SCALES in state:
        raise WireError(f"a tensor is named {_SCALES!r}: the codec reserves this name. Rename the tensor.")
    if encoding.encoder is not None:
        if generator is None:
            raise UsageError(f"{dtype} draws random numbers: pass a torch.Generator as generator=...")
        payload = pack_coded(state, encoding.encoder, generator, exact)
    else:
        payload = _rounded(state, encoding.text, generator, exact)
    index, tensors = lay_out(payload)
    return Message(head_of(header, encoding.text, index), tensors)


def head_of(header: Header, dtype: str, index: bytes) -> bytes:
    """Everything before the data of a message."""
    described = _describe(header, dtype)
    if len(described) > MAX_HEADER:
        raise WireError(
            f"a header of {len(described)} bytes: expected at most {MAX_HEADER}. Shorten the scheme."
        )
    return b"".join([MAGIC, len(described).to_bytes(4, "little"), described, index])


def _rounded(state: State, dtype: str, generator: torch.Generator | None, exact: frozenset[str]) -> State:
    """Each tensor in the precision `dtype` under its own name, and with int8 the scales."""
    tensors = {name: state[name].detach() for name in sorted(state)}
    kept, _ = quantize({name: tensor for name, tensor in tensors.items() if name in exact}, "float32")
    made, scales = quantize(
        {name: tensor for name, tensor in tensors.items() if name not in exact}, dtype, generator
    )
    payload = {name: kept[name] if name in exact else made[name] for name in tensors}
    if dtype == "int8":
        sent = [scales.get(name, 0.0) for name, tensor in payload.items() if tensor.dtype == torch.int8]
        payload[_SCALES] = torch.tensor(sent, dtype=torch.float32, device=device_of([tensors]))
    return payload


def decode(
    message: AnyMessage,
    exact: frozenset[str] = frozenset(),
    link: str | None = None,
    spec: Spec | None = None,
) -> tuple[Header, State]:
    """The header and the state of a message. Floats are float32, or float64 if they were sent as float64.

    `exact`, `link` and `spec` are the names, the encoding and the shapes that both ends agreed on. WireError if the
    message has another encoding, or if another tensor does not have the link's type. A message of a link below 8 bits
    holds no names: it needs both `link` and `spec`.
    """
    encoding = None if link is None else parse_encoding(link, "link")
    view = _start(message)
    header, dtype, length = _read_header(view)
    if encoding is not None and encoding.text != dtype:
        raise WireError(f"a message of precision {shown(dtype)}: expected {encoding.text}, that of the link.")
    coded = encoding is not None and encoding.encoder is not None
    if (not coded and dtype not in PRECISIONS) or (coded and spec is None):
        raise WireError(
            f"a message of {shown(dtype)} names no tensors: pass its link and its spec to decode it."
        )
    payload = dict(message.joined) if isinstance(message, Message) else read(*split_index(view[8 + length :]))
    if encoding is not None and encoding.encoder is not None and spec is not None:
        return header, read_coded(payload, encoding.encoder, spec, exact)
    return header, _restore(payload, dtype, exact)


def header_of(message: AnyMessage) -> tuple[Header, str]:
    """(the header of a message, the encoding that it states)"""
    header, dtype, _ = _read_header(_start(message))
    return header, dtype


def split_messages(body: bytes) -> list[bytes]:
    """Messages that were joined end to end. WireError if the body does not end where a message ends."""
    found: list[bytes] = []
    view = memoryview(body)
    while len(view):
        header = 8 + int.from_bytes(view[4:8], "little")
        if len(view) < header + 8 + DIGEST:
            raise WireError(f"{len(view)} bytes after {len(found)} messages are not a message.")
        index, _ = split_index(view[header:])
        end = header + 8 + len(index) + data_length(index) + DIGEST
        if end > len(view):
            raise WireError(f"message {len(found) + 1} claims {end} bytes: expected at most {len(view)}.")
        found.append(bytes(view[:end]))
        view = view[end:]
    return found


def _start(message: AnyMessage) -> memoryview:
    """The message without its digest, or at least everything before its data."""
    return memoryview(message.head) if isinstance(message, Message) else _unsealed(message)


def _unsealed(message: bytes) -> memoryview:
    """The message without its digest, after verifying it."""
    view = memoryview(message)
    if view[:4] != MAGIC:
        raise WireError(f"a message starts with {bytes(view[:4])!r}: expected {MAGIC!r}.")
    length = int.from_bytes(view[4:8], "little")
    room = len(view) - 8 - DIGEST
    if room < 0 or length > min(MAX_HEADER, room):
        raise WireError(
            f"a message of {len(view)} bytes claims a header of {length}: expected at most "
            f"{max(0, min(MAX_HEADER, room))}. It is truncated, or not a message."
        )
    if sha256(view[:-DIGEST]).digest()[:DIGEST] != view[-DIGEST:]:
        raise WireError(
            f"a message of {len(view)} bytes does not match its digest: it is damaged or truncated."
        )
    return view[:-DIGEST]


def _read_header(view: memoryview) -> tuple[Header, str, int]:
    """(the header, the encoding it states, its length)"""
    length = int.from_bytes(view[4:8], "little")
    return *_parse(bytes(view[8 : 8 + length])), length


def _describe(header: Header, dtype: str) -> bytes:
    stated = {name: value for name, value in vars(header).items() if value is not None}
    return as_json({**stated, "dtype": dtype})


def _parse(raw: bytes) -> tuple[Header, str]:
    given = parse_json(raw, "header")
    if given.keys() - {"since"} != set(_FIELDS):
        raise WireError(f"header fields {shown(sorted(given))}: expected {', '.join(_FIELDS)}.")
    dtype = given.pop("dtype")
    if not isinstance(dtype, str):
        raise WireError(f"header field dtype is {shown(dtype)}: expected text, such as {PRECISIONS[0]}.")
    header = Header(**given)  # type: ignore[arg-type]  # Header checks its fields
    if _describe(header, dtype) != raw:
        raise WireError("the header is not canonical: expected each field once, in order, without spaces.")
    return header, dtype


def _restore(payload: State, dtype: str, exact: frozenset[str]) -> State:
    scales = _scales(payload) if dtype == "int8" else {}
    for name, tensor in payload.items():
        floats = _EXACT if name in exact else _FLOATS[dtype]
        if name == _SCALES or (tensor.is_floating_point() and tensor.dtype not in floats):
            raise WireError(f"tensor {shown(name)} has type {tensor.dtype} in a {dtype} message.")
    return dequantize(payload, scales)


def _scales(payload: State) -> dict[str, float]:
    names = sorted(name for name, tensor in payload.items() if tensor.dtype == torch.int8)
    scales = payload.pop(_SCALES, None)
    if scales is None or scales.dtype != torch.float32 or scales.shape != (len(names),):
        found = "none" if scales is None else f"{scales.dtype} of shape {tuple(scales.shape)}"
        raise WireError(f"the scales of an int8 message are {found}: expected {len(names)} of float32.")
    values = scales.tolist()
    for name, scale in zip(names, values, strict=True):
        if not 0 <= scale < float("inf"):
            raise WireError(f"tensor {shown(name)} has scale {scale}: expected a finite number, 0 or more.")
    return dict(zip(names, values, strict=True))
