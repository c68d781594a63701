"""Hostile messages of links below 8 bits: each is refused with a sentence, or decodes to a finite state of the spec."""

import random
import zlib
from hashlib import sha256

import pytest
import torch

from fedpara.errors import UpdateRejected, WireError
from fedpara.wire import Header, admit, decode, make_message, parse_encoding, spec_of, split_messages
from fedpara.wire.codec import DIGEST, MAGIC, _describe
from fedpara.wire.coded import pack_coded
from fedpara.wire.tensors import lay_out

HEADER = Header(round=3, method="fedavg", scheme="fedpara", sender="client:17", examples=5)
STATE = {
    "a": torch.randn(20, 21, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(301, generator=torch.Generator().manual_seed(1)),
    "bias": torch.ones(7),
    "counter": torch.tensor(3),
}


def sealed(payload, text):
    described = _describe(HEADER, text)
    index, tensors = lay_out(payload)
    body = b"".join([MAGIC, len(described).to_bytes(4, "little"), described, index])
    body += b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values())
    return body + sha256(body).digest()[:DIGEST]


def forged(link, change):
    encoding = parse_encoding(link, "link")
    payload = pack_coded(STATE, encoding.encoder, torch.Generator().manual_seed(2), frozenset())
    payload = {name: tensor.clone() for name, tensor in payload.items()}
    change(payload)
    return sealed(payload, encoding.text)


def read(link, message):
    spec = spec_of(STATE, link)
    return admit(message, spec=spec, round=3, method="fedavg", scheme="fedpara", link=link)[1]


def test_a_forged_message_without_a_change_is_a_good_one():
    for link in ("int4", "topk(0.05)", "eden"):
        assert read(link, forged(link, lambda p: None)).keys() == STATE.keys()


def put(name, place, value):
    def change(payload):
        payload[name][place] = value

    return change


def drop(name):
    return lambda payload: payload.pop(name)


def add(name, tensor):
    return lambda payload: payload.update({name: tensor})


def longer(name):
    return lambda payload: payload.update({name: torch.cat([payload[name], payload[name][:1]])})


def deflated(data):
    compressor = zlib.compressobj(wbits=-15)
    return torch.frombuffer(bytearray(compressor.compress(data) + compressor.flush()), dtype=torch.uint8)


def both(digits, listed):
    return lambda payload: payload.update(__digits__=deflated(digits), __listed__=deflated(listed))


@pytest.mark.parametrize(
    ("link", "change", "complaint"),
    [
        ("int4", longer("__codes__"), "expected 361 of torch.uint8 for int4"),
        ("int4", longer("__scales__"), "expected 7 of torch.bfloat16"),
        ("int4", longer("__plain__"), "expected 7 of torch.float32"),
        ("int4", drop("__scales__"), "__scales__ is missing"),
        ("int4", add("__scales__", torch.ones(7)), "__scales__ is torch.float32"),
        ("int4", add("a", torch.zeros(20, 21)), "'a' has type torch.float32 in a int4"),
        ("int4", add("a", torch.tensor(1)), "'a' has type torch.int64"),
        ("int4", add("__signs__", torch.zeros(3, dtype=torch.uint8)), "also holds '__signs__'"),
        ("int4", drop("counter"), "lacks 'counter'"),
        ("int4", put("__codes__", 0, 255), "a code is above 14"),
        ("int4", put("__codes__", -1, 0x77), "the unused digits"),
        ("int4", put("__scales__", 0, float("nan")), "a scale is negative, infinite"),
        ("int4", put("__scales__", 5, -1.0), "a scale is negative, infinite"),
        ("int4", put("__plain__", 0, float("inf")), "'bias' holds NaN or infinity"),
        ("ternary", put("__codes__", 3, 243), "a packed byte is above 242"),
        ("int2", put("__codes__", -1, 255), "the unused digits"),
        ("sign", put("__signs__", -1, 255), "the unused digits"),
        ("sign", put("__scales__", 0, float("inf")), "a scale is negative"),
        ("eden", put("__scales__", 0, float("nan")), "a scale is negative"),
        ("eden", longer("__seed__"), "expected 1 of torch.int32"),
        ("topk(0.05)", put("__positions__", 0, 255), "the bitmap of positions"),
        ("topk(0.5)", put("__positions__", 0, 255), "the bitmap of positions"),
        ("topk(0.05)", put("__low__", slice(0, 10), 255), "not ascending, or beyond"),
        ("topk(0.05)", put("__values__", 0, float("nan")), "a value is infinite"),
        ("stc(0.05)", put("__positions__", 0, 255), "the bitmap of positions"),
        ("stc(0.05)", put("__scales__", 0, float("nan")), "a scale is"),
        ("powersgd", put("__p__", 0, float("nan")), "a factor is infinite"),
        ("powersgd", put("__q__", -1, float("inf")), "a factor is infinite"),
        ("grid(0.5)", put("__exponents__", 0, 101), "an exponent is outside"),
        ("grid(0.5)", put("__base__", 0, 5), "the base is 5"),
        ("grid(0.5)", put("__base__", 0, 4), "expected 181"),
        ("grid(0.5)", put("__digits__", slice(0, 9), 255), "not in deflate's format"),
        ("grid(0.5)", longer("__digits__"), "a grid decode to"),
        ("grid(0.5)", longer("__listed__"), "a grid decode to"),
        ("grid(0.5)", add("__digits__", torch.zeros(9000, dtype=torch.uint8)), "expected at most 377"),
        ("grid(0.5)", add("__listed__", deflated(bytes(9))), "a grid decode to . bytes or more: expected"),
        ("grid(0.5)", add("__digits__", deflated(bytes(10**4))), "decode to 362 bytes or more: expected 361"),
        ("grid(0.5)", add("__digits__", deflated(b"\xff" * 361)), "the unused digits"),
        ("grid(0.5)", both(b"\xff" * 360 + b"\x0f", bytes(3 * 721)), "a listed number is below 15"),
    ],
)
def test_a_hostile_message_is_refused(link, change, complaint):
    with pytest.raises(WireError, match=complaint):
        read(link, forged(link, change))


def test_another_link_or_option_is_refused():
    message = make_message(STATE, HEADER, "int4(block=64)", torch.Generator())
    for link in ("int4", "int8", "float32", "sign"):
        with pytest.raises(WireError, match="a message of precision"):
            read(link, bytes(message))
    with pytest.raises(WireError, match="pass its link and its spec"):
        decode(message)
    with pytest.raises(WireError, match="pass its link and its spec"):
        decode(message, link="int4(block=64)")


def test_the_codecs_names_cannot_be_sent():
    with pytest.raises(WireError, match="__codes__"):
        make_message({"__codes__": torch.zeros(3)}, HEADER, "int4", torch.Generator())


@pytest.mark.parametrize(
    "link", ["int4", "ternary", "sign", "topk(0.05)", "stc(0.05)", "eden", "powersgd", "grid(0.5)"]
)
def test_mutated_messages_are_refused_or_finite(link):
    """With a correct digest: whoever can write a message can write its digest."""
    good = bytes(make_message(STATE, HEADER, link, torch.Generator().manual_seed(0)))[:-DIGEST]
    draw, refused = random.Random(0), 0
    for _ in range(150):
        body = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        message = bytes(body) + sha256(bytes(body)).digest()[:DIGEST]
        try:
            state = read(link, message)
        except (WireError, UpdateRejected):
            refused += 1
            continue
        assert {name: (t.dtype, t.shape) for name, t in state.items()} == spec_of(STATE, link)
        assert all(bool(t.isfinite().all()) for t in state.values())
    assert refused


def test_joined_messages_are_split_where_they_end():
    messages = [
        bytes(make_message(STATE, HEADER, link, torch.Generator().manual_seed(0)))
        for link in ("int4", "float32", "eden")
    ]
    assert split_messages(b"".join(messages)) == messages
    assert split_messages(b"") == []
    for wrong in (messages[0][:-1], messages[0] + b"FPM1", messages[0][:20], messages[0] + messages[1][:-3]):
        with pytest.raises(WireError):
            split_messages(wrong)
