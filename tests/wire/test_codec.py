"""Properties of the codec: round trips, a canonical encoding, and a payload that safetensors can read."""

import random
from collections.abc import Callable
from hashlib import sha256

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.errors import ConfigError, WireError
from fedpara.layout import runs
from fedpara.state import State
from fedpara.wire import Header, decode, encode, make_message, spec_of, tensors
from fedpara.wire.codec import DIGEST, MAGIC, MAX_HEADER

HEADER = Header(round=3, method="fedavg", scheme="fedpara(0.1)", sender="client:17", examples=500)
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@st.composite
def states(draw: st.DrawFn) -> State:
    names = draw(st.lists(st.text(max_size=8), max_size=6, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    state: State = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        state[name] = (8 * torch.randn(shape, generator=generator)).to(draw(st.sampled_from(DTYPES)))
    return state


def payload(message: bytes) -> bytes:
    return message[8 + int.from_bytes(message[4:8], "little") : -DIGEST]


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def exactly(state: State) -> State:
    return {n: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for n, t in state.items()}


@settings(deadline=None, max_examples=60)
@given(state=states())
def test_float32_returns_what_was_sent(state: State) -> None:
    message = encode(state, HEADER)
    header, back = decode(message)
    assert header == HEADER
    assert same(back, exactly(state))
    # The safetensors library reads the same tensors, and its encoding has the same size.
    assert same(safetensors.torch.load(payload(message)), exactly(state))
    names = "".join(state)
    if names.isascii() and names.isprintable():
        assert len(payload(message)) == len(safetensors.torch.save(exactly(state)))


@settings(deadline=None, max_examples=60)
@given(state=states(), dtype=st.sampled_from(["float32", "float16", "bfloat16", "int8"]))
def test_a_message_decodes_like_its_bytes_and_knows_their_length(state: State, dtype: str) -> None:
    kept = make_message(state, HEADER, dtype, torch.Generator().manual_seed(1))
    sealed = bytes(kept)
    assert sealed == encode(state, HEADER, dtype, torch.Generator().manual_seed(1))
    assert len(kept) == len(sealed)
    (header, inside), (_, outside) = decode(kept), decode(sealed)
    assert header == HEADER
    assert same(inside, outside)


def test_one_block_of_memory_is_not_copied() -> None:
    flat = torch.randn(10)
    _, read = decode(make_message({"a": flat[:4], "b": flat[4:]}, HEADER))
    assert read["a"].data_ptr() == flat.data_ptr()
    assert torch.equal(read["b"], flat[4:])


def test_a_few_blocks_are_not_copied_but_many_become_one() -> None:
    two = {"a": torch.randn(3), "b": torch.randn(2, 2), "c": torch.tensor(7), "e": torch.empty(0)}
    _, read = decode(make_message(two, HEADER))
    assert same(read, two)
    assert all(read[name].data_ptr() == two[name].data_ptr() for name in "abc")
    many = {f"{i:02d}": torch.randn(3) for i in range(20)}
    _, read = decode(make_message(many, HEADER))
    assert same(read, many)
    assert len(runs(list(read.values()))) == 1


@settings(deadline=None, max_examples=60)
@given(state=states(), dtype=st.sampled_from(["float32", "float16", "bfloat16", "int8"]))
def test_equal_states_give_equal_bytes_in_any_order(state: State, dtype: str) -> None:
    shuffled = list(state.items())
    random.Random(0).shuffle(shuffled)
    first, second = (
        encode(s, HEADER, dtype, torch.Generator().manual_seed(1)) for s in (state, dict(shuffled))
    )
    assert first == second
    back = decode(first)[1]
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in back.items()} == spec_of(state, dtype)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 1)])
def test_each_precision_costs_its_bytes(dtype: str, size: int) -> None:
    numbers = 100_000
    message = encode({"w": torch.randn(numbers)}, HEADER, dtype, torch.Generator().manual_seed(0))
    assert 0 < len(message) - size * numbers < 400


def test_int8_has_a_scale_per_tensor_and_keeps_integers_exact() -> None:
    state = {
        "b.large": torch.tensor([1000.0, -500.0]),
        "a.small": torch.tensor([1e-6, 2e-6]),
        "counter": torch.tensor(12345678901),
        "c.already": torch.tensor([-128, 127], dtype=torch.int8),
    }
    back = decode(encode(state, HEADER, "int8", torch.Generator().manual_seed(0)))[1]
    torch.testing.assert_close(back["b.large"], state["b.large"], rtol=0, atol=1000 / 127)
    torch.testing.assert_close(back["a.small"], state["a.small"], rtol=0, atol=2e-6 / 127)
    assert torch.equal(back["counter"], state["counter"])
    assert torch.equal(back["c.already"], state["c.already"])


def test_decoded_tensors_share_no_memory_with_the_message() -> None:
    state = {"a": torch.ones(3), "b": torch.ones(3)}
    message = encode(state, HEADER)
    back = decode(message)[1]
    back["a"].add_(1)
    assert torch.equal(back["b"], torch.ones(3))
    assert same(decode(message)[1], state)


def test_views_gradients_and_shared_memory_encode() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    state = {
        "transposed": base.transpose(0, 2),
        "channels": base[None].contiguous(memory_format=torch.channels_last),
        "sliced": base[:, ::2],
        "expanded": torch.tensor(1.0).expand(3),
        "expanded to one": torch.tensor(2.0).expand(1),
        "one of many": base[:1, 1:2, 2::4],
        "scalar of many": base[1, 2, 3],
        "leaf": torch.nn.Parameter(base),
        "tied": base,
    }
    back = decode(encode(state, HEADER))[1]
    assert same(back, {name: tensor.detach() for name, tensor in state.items()})


def test_an_empty_state_round_trips() -> None:
    for dtype in ("float32", "int8"):
        assert decode(encode({}, HEADER, dtype)) == (HEADER, {})


def test_the_format_is_as_documented() -> None:
    message = encode({"w": torch.zeros(1)}, Header(0, "fedavg", "original"))
    described = (
        b'{"round":0,"method":"fedavg","scheme":"original","sender":"server","examples":0,"dtype":"float32"}'
    )
    assert message.startswith(MAGIC + len(described).to_bytes(4, "little") + described)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"round": -1}, "round is -1"),
        ({"round": True}, "round is True"),
        ({"round": 10**30}, "round is 1000"),
        ({"round": 1.0}, "round is 1.0"),
        ({"examples": -5}, "examples is -5"),
        ({"since": -1}, "since is -1"),
        ({"method": None}, "method is None"),
        ({"sender": "client:-1"}, "sender is 'client:-1'"),
        ({"sender": "client:1" + "0" * 18}, "sender is 'client:1000"),
        ({"sender": "client:٣"}, "expected 'server'"),
        ({"sender": "server\n"}, "expected 'server'"),
    ],
)
def test_a_wrong_header_is_rejected(fields: dict[str, object], complaint: str) -> None:
    good: dict[str, object] = {"round": 0, "method": "fedavg", "scheme": "original"}
    with pytest.raises(WireError, match=complaint):
        Header(**(good | fields))  # type: ignore[arg-type]


def test_a_state_that_could_not_be_decoded_is_not_encoded() -> None:
    with pytest.raises(WireError, match="expected at most 65536"):
        encode({}, Header(0, "fedavg", "x" * MAX_HEADER))
    for name in ("__metadata__", "__scales__"):
        with pytest.raises(WireError, match=name):
            encode({name: torch.zeros(1)}, HEADER)
    with pytest.raises(ConfigError, match="dtype is 'fp16'"):
        encode({}, HEADER, "fp16")
    with pytest.raises(WireError, match="complex64"):
        encode({"w": torch.zeros(1, dtype=torch.complex64)}, HEADER)
    with pytest.raises(WireError, match="16 dimensions"):
        encode({"w": torch.zeros([1] * 17)}, HEADER)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda m: b"", "expected b'FPM1'"),
        (lambda m: b"PK\x03\x04" + m[4:], r"starts with b'PK\\x03\\x04'"),
        (lambda m: m[:20], "claims a header of"),
        (lambda m: m[:4] + b"\xff" * 4 + m[8:], "claims a header of 4294967295"),
        (lambda m: m[:-1], "damaged or truncated"),
        (lambda m: m + b"\0", "damaged or truncated"),
        (lambda m: m[:60] + bytes([m[60] ^ 1]) + m[61:], "damaged or truncated"),
    ],
)
def test_a_damaged_message_is_rejected(damage: Callable[[bytes], bytes], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode(damage(encode({"w": torch.ones(8)}, HEADER)))


def test_a_large_index_is_not_cached(monkeypatch):
    monkeypatch.setattr(tensors, "CACHED_INDEX", 64)
    message = bytes(encode({f"w{i}": torch.zeros(0) for i in range(50)}, HEADER))
    tensors._index.cache_clear()
    assert len(decode(message)[1]) == 50
    assert tensors._index.cache_info().currsize == 0


def test_a_header_above_the_limit_is_not_read() -> None:
    """Even if the message is large enough for it."""
    body = MAGIC + (MAX_HEADER + 1).to_bytes(4, "little") + b"{" * (1 << 20)
    with pytest.raises(
        WireError, match=f"claims a header of {MAX_HEADER + 1}: expected at most {MAX_HEADER}"
    ):
        decode(body + sha256(body).digest()[:DIGEST])
