"""Ten thousand damaged and forged messages: each one raises WireError.

A forger recomputes the digest. A forged message passes only if an honest client could have sent it: with other finite
numbers, another sender or another number of examples. These tests cover every other forgery.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
import torch

from fedpara.errors import WireError
from fedpara.state import State
from fedpara.wire import Header, admit, decode, encode, spec_of
from fedpara.wire.codec import DIGEST

HEADER = Header(round=3, method="fedavg", scheme="fedpara(0.1)", sender="client:17", examples=500)
# All tensors differ in size, so that swapping two names never gives a valid message.
STATE: State = {
    "features.0.weight.x1": torch.linspace(-1, 1, 12).reshape(4, 3),
    "features.0.weight.y1": torch.linspace(-2, 2, 6).reshape(2, 3),
    "features.0.bias": torch.linspace(0, 1, 4),
    "scalar": torch.tensor(0.5),
    "empty": torch.empty(0, 3),
    "norm.num_batches_tracked": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
}
Mutation = Callable[[random.Random, bytes], bytes]


def judge(message: bytes, link: str = "float32") -> tuple[Header, State]:
    return admit(
        message,
        spec=spec_of(STATE),
        round=3,
        method="fedavg",
        scheme="fedpara(0.1)",
        link=link,
        max_norm=100.0,
    )


def parts(message: bytes) -> tuple[bytes, bytes, bytes]:
    """(header, index, data)"""
    start = 8 + int.from_bytes(message[4:8], "little")
    size = int.from_bytes(message[start : start + 8], "little")
    return message[8:start], message[start + 8 : start + 8 + size], message[start + 8 + size : -DIGEST]


def forge(
    header: bytes, index: bytes, data: bytes, *, claim: int | None = None, spread: int | None = None
) -> bytes:
    """A message with a valid digest; claim and spread are false lengths of header and index."""
    lengths = (len(header) if claim is None else claim, len(index) if spread is None else spread)
    body = (
        b"FPM1" + lengths[0].to_bytes(4, "little") + header + lengths[1].to_bytes(8, "little") + index + data
    )
    return body + sha256(body).digest()[:DIGEST]


def dump(value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def flip(rng: random.Random, message: bytes) -> bytes:
    damaged = bytearray(message)
    for place in rng.sample(range(8 * len(message)), rng.choice([1, 1, 1, 2, 9])):
        damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


def cut(rng: random.Random, message: bytes) -> bytes:
    start, end = sorted(rng.sample(range(1, len(message)), 2))
    return rng.choice(
        [message[:end], message[start:], message[:start] + message[end:], message + message[start:]]
    )


def cut_and_sign(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    kept = data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + rng.randbytes(rng.randint(1, 9))
    return forge(header, index, kept)


def noise(rng: random.Random, message: bytes) -> bytes:
    return rng.choice([b"", b"FPM1", message[:8]]) + rng.randbytes(rng.randrange(200))


def swap_names(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    entries = json.loads(index)
    a, b = rng.sample(sorted(entries), 2)
    if rng.random() < 0.5:
        entries[a], entries[b] = entries[b], entries[a]
        return forge(header, dump(entries), data)
    swapped = dict(STATE)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return encode(swapped, HEADER)


def false_lengths(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    lie = rng.choice([0, 1, 7, len(message), 2**16 + 1, 2**31, 2**32 - 1, rng.randrange(2**32)])
    if rng.random() < 0.5:
        return forge(header, index, data, claim=lie)
    return forge(
        header, index, data, spread=rng.choice([lie, 2**63, 2**64 - 1, len(index) - 8, len(index) + 8])
    )


def huge_header(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    filler = rng.choice([b" " * 70_000, b"[" * 60_000, b'{"a":' * 10_000, b"9" * 60_000, b"\xff" * 100])
    return forge(*rng.choice([(filler, index, data), (header + filler, index, data), (header, filler, data)]))


def deep(rng: random.Random, message: bytes) -> bytes:
    """JSON that may parse, nested about as deep as Python allows."""
    header, index, data = parts(message)
    depth = rng.randrange(1, 1200)
    nest = b"[" * depth + b"]" * depth
    first = header.replace(b'"round":3', b'"round":' + nest)
    shape = b'{"w":{"dtype":"F32","shape":' + nest + b"}}"
    return forge(
        *rng.choice([(nest, index, data), (first, index, data), (header, nest, data), (header, shape, data)])
    )


def wrong_type(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    if rng.random() < 0.5:
        name = rng.choice(sorted(STATE))
        others = [torch.float64, torch.int32, torch.uint8, torch.int8, torch.float32, torch.bool]
        return encode(
            STATE | {name: STATE[name].to(rng.choice([d for d in others if d != STATE[name].dtype]))}, HEADER
        )
    entries = json.loads(index)
    entry = entries[rng.choice(sorted(entries))]
    code: Any = rng.choice(
        ["F64", "F32", "I32", "F16", "U8", "BOOL", "C64", "F8_E4M3", "", 7, None, ["F32"], {}]
    )
    entry["dtype"] = code if code != entry["dtype"] else "O"
    return forge(header, dump(entries), data)


def twice(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    if rng.random() < 0.5:
        fields = json.loads(header)
        name = rng.choice(sorted(fields))
        return forge(header[:-1] + b"," + json.dumps({name: fields[name]}).encode()[1:], index, data)
    entries = json.loads(index)
    name = rng.choice(sorted(entries))
    again = json.dumps({name: entries[name]}, separators=(",", ":")).encode()
    text = index.rstrip()[:-1] + b"," + again[1:]
    return forge(header, text + b" " * (-len(text) % 8), data)


def not_finite(rng: random.Random, message: bytes) -> bytes:
    name = rng.choice([n for n, t in STATE.items() if t.is_floating_point() and t.numel()])
    bad = STATE[name].clone()
    bad.view(-1)[rng.randrange(bad.numel())] = rng.choice([math.nan, math.inf, -math.inf])
    return encode(STATE | {name: bad}, HEADER)


def too_far(rng: random.Random, message: bytes) -> bytes:
    return encode(STATE | {"scalar": torch.tensor(rng.choice([-1, 1]) * rng.uniform(101, 3e38))}, HEADER)


def wrong_shape(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    entries = json.loads(index)
    entry = entries[rng.choice(sorted(entries))]
    shapes: list[Any] = [[-1], [2**63], [2**40, 2**40], [0, 2**70], [1] * 65]
    shapes += [[1.0], [True], ["4"], 4, None, [[4]]]
    honest = [[3, 4], [12], [1], [], [5], [0], [1, 4]]
    entry["shape"] = rng.choice([shape for shape in shapes + honest if shape != entry["shape"]])
    return forge(header, dump(entries), data)


def wrong_offsets(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    entries = json.loads(index)
    entry = entries[rng.choice(sorted(entries))]
    begin, end = entry["data_offsets"]
    lies: list[Any] = [
        [begin, end + 4],
        [begin + 1, end + 1],
        [end, begin],
        [-8, end],
        [0, 2**64],
        [begin],
        None,
    ]
    entry["data_offsets"] = rng.choice([lie for lie in lies if lie != [begin, end]])
    return forge(header, dump(entries), data)


def other_header(rng: random.Random, message: bytes) -> bytes:
    header, index, data = parts(message)
    fields = json.loads(header)
    lies: dict[str, list[Any]] = {
        "round": [2, 4, -3, 3.0, True, None, "3", 10**400],
        "method": ["fedprox", "", None, 3, "fedavg ", "\ud800"],
        "scheme": ["original", "fedpara(0.2)", ["fedpara(0.1)"]],
        "sender": ["client:-1", "client:", "client:017", "root", 17, None, "client:1\n"],
        "examples": [0, -1, 1.5, False, "500", math.nan, math.inf],
        "since": [2, 0, -1, 1.5, None, "2", True],
        "dtype": ["float16", "int8", "bfloat16", "float64", "pickle", None, 4],
        "extra": [1],
    }
    name = rng.choice(sorted(lies))
    if rng.random() < 0.1 and name in fields:
        del fields[name]
    else:
        fields[name] = rng.choice(lies[name])
        if name == "since":  # in its place
            fields["dtype"] = fields.pop("dtype")
    return forge(json.dumps(fields, separators=(",", ":")).encode(), index, data)


def other_form(rng: random.Random, message: bytes) -> bytes:
    """The same content, encoded differently."""
    header, index, data = parts(message)
    fields, entries = json.loads(header), json.loads(index)
    backwards = {name: entries[name] for name in reversed(entries)}
    return rng.choice(
        [
            forge(json.dumps(fields).encode(), index, data),
            forge(header + b" ", index, data),
            forge(b"\xef\xbb\xbf" + header, index, data),
            forge(json.dumps(fields, separators=(",", ":"), sort_keys=True).encode(), index, data),
            forge(header, json.dumps(entries).encode(), data),
            forge(header, index + b" " * 8, data),
            forge(header, dump(backwards), data),
            forge(header, dump({**entries, "__metadata__": {"format": "pt"}}), data),
        ]
    )


def other_names(rng: random.Random, message: bytes) -> bytes:
    name = rng.choice(sorted(STATE))
    kept = {n: t for n, t in STATE.items() if n != name}
    odd = rng.choice(["", "control/" + name, name + "\0", name.upper(), "__scales_", "../x", "\N{SNOWMAN}"])
    return encode(kept if rng.random() < 0.3 else kept | {odd: STATE[name]}, HEADER)


def false_truth(rng: random.Random, message: bytes) -> bytes:
    """A boolean that is neither 0 nor 1: the mask is at the end of the data."""
    header, index, data = parts(message)
    return forge(header, index, data[:-1] + bytes([rng.randint(2, 255)]))


MUTATIONS: list[Mutation] = [
    *(flip, cut, cut_and_sign, noise, swap_names, false_lengths, huge_header, deep, wrong_type, twice),
    *(not_finite, too_far, wrong_shape, wrong_offsets, other_header, other_form, other_names, false_truth),
]


def test_ten_thousand_mutated_messages_are_rejected() -> None:
    message = encode(STATE, HEADER)
    assert judge(message)[0] == HEADER
    rng = random.Random(20240229)
    refused: Counter[str] = Counter()
    for turn in range(10_000):
        mutate = MUTATIONS[turn % len(MUTATIONS)]
        mutated = mutate(rng, message)
        assert mutated != message, mutate.__name__
        with pytest.raises(WireError) as caught:
            judge(mutated)
        assert len(str(caught.value)) < 700, "untrusted bytes must not fill the log"
        refused[mutate.__name__] += 1
    assert len(refused) == len(MUTATIONS)


def test_a_signed_bit_flip_outside_the_data_changes_only_the_sender() -> None:
    message = encode(STATE, HEADER)
    header, index, _ = parts(message)
    let_in = 0
    for place in range(32, 8 * (8 + len(header) + 8 + len(index))):
        damaged = bytearray(message[:-DIGEST])
        damaged[place // 8] ^= 1 << place % 8
        try:
            given, state = judge(bytes(damaged) + sha256(damaged).digest()[:DIGEST])
        except WireError:
            continue
        let_in += 1
        assert given.round == HEADER.round
        assert (given.sender, given.examples) != (HEADER.sender, HEADER.examples)
        assert all(torch.equal(state[name], STATE[name]) for name in STATE)
    assert let_in < 40


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_every_bit_of_a_quantized_message_is_checked(dtype: str) -> None:
    message = encode({"w": torch.linspace(-1, 1, 8)}, HEADER, dtype, torch.Generator().manual_seed(0))
    for place in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(WireError):
            judge(bytes(damaged), dtype)


@pytest.mark.parametrize(
    ("scales", "complaint"),
    [
        (None, "are none: expected 1"),
        (torch.ones(2), r"shape \(2,\): expected 1"),
        (torch.ones(1, dtype=torch.float64), "float64"),
        (torch.tensor([math.nan]), "scale nan"),
        (torch.tensor([math.inf]), "scale inf"),
        (torch.tensor([-1.0]), "scale -1"),
    ],
)
def test_false_scales_are_rejected(scales: torch.Tensor | None, complaint: str) -> None:
    state = {"w": torch.ones(3, dtype=torch.int8)} | ({} if scales is None else {"scales__": scales})
    header, index, data = parts(encode(state, HEADER))
    header = header.replace(b'"dtype":"float32"', b'"dtype":"int8"')
    entries = {name.replace("scales__", "__scales__"): entry for name, entry in json.loads(index).items()}
    with pytest.raises(WireError, match=complaint):
        judge(forge(header, dump(entries), data), "int8")


@pytest.mark.parametrize("shape", [[0, 2**40, 2**40], [2**62, 0], [0] + [1] * 16, [0, -1]])
def test_an_empty_tensor_of_an_impossible_shape_is_rejected(shape: list[int]) -> None:
    header, index, data = parts(encode({"w": torch.empty(0)}, HEADER))
    entries = json.loads(index)
    entries["w"]["shape"] = shape
    with pytest.raises(WireError, match="'w' has shape"):
        decode(forge(header, dump(entries), data))


@pytest.mark.parametrize("name", ["__scales__", "__metadata__"])
def test_a_reserved_name_is_rejected(name: str) -> None:
    header, index, data = parts(encode({"w": torch.ones(1)}, HEADER))
    with pytest.raises(WireError, match=name):
        decode(forge(header, dump({name: json.loads(index)["w"]}), data))
