"""Golden and properties of each encoder: bytes on the wire, values by hand, bias and error as its paper says."""

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpara.errors import ConfigError, UpdateRejected, UsageError
from fedpara.wire import Header, Link, decode, make_message, parse_encoding, spec_of
from fedpara.wire.encoders.eden import hadamard, random_signs
from fedpara.wire.encoders.grid import exactly

HEADER = Header(round=3, method="fedavg", scheme="fedpara", sender="client:17", examples=500)
LINKS = (
    *("int4", "int2", "ternary", "sign", "topk(0.01)", "topk(0.4)", "stc(0.01)"),
    *("eden", "eden(bits=2)", "eden(bits=4, unbiased=False)", "powersgd(rank=2)", "grid(0.5)", "grid(2)"),
)
each_link = pytest.mark.parametrize("link", LINKS)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def encoder(link):
    return parse_encoding(link, "link").encoder


def through(link, x, seed=0):
    one = encoder(link)
    return one.decode(one.encode([x], seeded(seed)), [x.shape])[0]


def data_bytes(parts):
    return sum(tensor.numel() * tensor.element_size() for tensor in parts.values())


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("int4", 500 + 2 * 8),  # two codes per byte; a bfloat16 per 128
        ("int4(block=64)", 500 + 2 * 16),
        ("int2", 250 + 2 * 8),
        ("ternary", 200 + 2 * 8),
        ("sign", 125 + 2 * 4),
        ("topk(0.01)", 2 * 10 + 8 + 4),  # 10 values; 10 times 6 low bits; a bitmap of 10 + 16 - 1
        ("topk(0.4)", 2 * 400 + 125),  # the plain bitmap is smaller
        ("stc(0.01)", 2 + 2 + 8 + 4),  # 10 signs, one scale, positions as above
        ("eden", 128 + 4 + 4),  # one block of 1,024 with its scale, and the seed
        ("eden(block=256)", 125 + 4 * 4 + 4 + 3),  # 768 + a block of 256, 24 bits more than 1,000
        ("eden(bits=2)", 256 + 4 + 4),
        ("powersgd(rank=2)", 2 * 2 * (40 + 25)),
    ],
)
def test_each_encoder_costs_its_bytes(link, expected):
    x = torch.randn(40, 5, 5, generator=seeded(0))
    one = encoder(link)
    parts = one.encode([x], seeded(1))
    assert data_bytes(parts) == expected
    assert {name: (part.dtype, part.numel()) for name, part in parts.items()} == one.layout([x.shape])
    message = make_message({"w": x}, HEADER, link, seeded(1))
    assert len(message) == len(bytes(message))
    assert 0 < len(message) - expected < 550


@each_link
def test_a_hundred_tensors_need_no_longer_index_than_one(link):
    overhead = []
    for count in (1, 100):
        state = {f"layer{i}.weight": torch.randn(20, 20, generator=seeded(i)) for i in range(count)}
        state |= {f"layer{i}.bias": torch.randn(20, generator=seeded(i)) for i in range(count)}
        message = make_message(state, HEADER, link, seeded(0))
        overhead.append(len(message) - data_bytes(message.tensors))
    assert overhead[1] <= overhead[0] + 64


@each_link
def test_a_state_returns_with_its_names_shapes_and_what_is_exact(link):
    state = {
        "conv": torch.randn(8, 4, 3, 3, generator=seeded(0)),
        "wide": torch.randn(700, generator=seeded(1), dtype=torch.float64),
        "half": torch.randn(30, 30, generator=seeded(5)).bfloat16(),
        "bias": torch.randn(8, generator=seeded(2)),
        "running_var": torch.rand(300, generator=seeded(3)),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(0.3),
        "counter": torch.tensor(12345678901),
    }
    exact = frozenset({"running_var"})
    message = make_message(state, HEADER, link, seeded(4), exact)
    spec = spec_of(state, link, exact)
    (header, inside), (_, outside) = (decode(m, exact, link, spec) for m in (message, bytes(message)))
    assert header == HEADER
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in inside.items()} == spec
    for name in state:
        assert torch.equal(inside[name], outside[name])
    for name in ("bias", "running_var", "scalar", "counter"):
        assert torch.equal(inside[name], state[name])
    assert bytes(make_message(dict(reversed(state.items())), HEADER, link, seeded(4), exact)) == bytes(
        message
    )


@pytest.mark.parametrize(
    ("link", "x", "codes"),
    [
        ("int4(block=16)", [7.0, -7.0, 0.0, 3.0], [14 + 16 * 0, 7 + 16 * 10]),
        ("int2(block=16)", [3.0, -3.0, 1.0, -1.0], [3 + 4 * 0 + 16 * 2 + 64 * 1]),
        ("ternary(block=16)", [2.0, -2.0, 0.0, 2.0, 2.0], [2 + 3 * 0 + 9 * 1 + 27 * 2 + 81 * 2]),
        ("sign(block=16)", [1.0, -3.0, 0.0, 4.0, -2.0], [1 + 4 + 8]),
    ],
)
def test_levels_and_signs_by_hand(link, x, codes):
    """Numbers on a level stay there, whatever is drawn."""
    tensor = torch.tensor(x)
    parts = encoder(link).encode([tensor], seeded(0))
    assert parts["signs" if "sign" in link else "codes"].tolist() == codes
    back = encoder(link).decode(parts, [tensor.shape])[0]
    expected = np.where(np.array(x) >= 0, 2.0, -2.0) if "sign" in link else x
    torch.testing.assert_close(back, torch.tensor(expected, dtype=torch.float32))


def test_positions_by_hand():
    """n 40, k 4: low bits of 3, 17, 18 and 39 are 3, 1, 2 and 7; the rest, 0, 2, 2 and 4, sets bits 0, 3, 4 and 7."""
    x = torch.zeros(40)
    x[[3, 17, 18, 39]] = torch.tensor([4.0, -3.0, 2.0, -1.0])
    parts = encoder("topk(0.1)").encode([x], seeded(0))
    assert parts["positions"].tolist() == [0b10011001]
    assert parts["low"].tolist() == [0x8B, 0x0E]
    assert parts["values"].tolist() == [4.0, -3.0, 2.0, -1.0]
    assert torch.equal(through("topk(0.1)", x), x)
    ternary = encoder("stc(0.1)").encode([x], seeded(0))
    assert {name: ternary[name].tolist() for name in ("positions", "low")} == {
        name: parts[name].tolist() for name in ("positions", "low")
    }
    assert ternary["signs"].tolist() == [0b0101]
    assert ternary["scales"].tolist() == [2.5]
    assert torch.equal(through("stc(0.1)", x), 2.5 * x.sign())


@pytest.mark.parametrize("fraction", [0.003, 0.01, 0.1, 0.3, 0.6, 0.97])
def test_topk_keeps_the_largest(fraction):
    x = torch.randn(37, 29, generator=seeded(1))
    k = round(fraction * x.numel())
    back = through(f"topk({fraction})", x)
    largest = x.abs().flatten().sort(descending=True).values[k - 1]
    torch.testing.assert_close(back, torch.where(x.abs() >= largest, x, 0.0), rtol=2**-8, atol=0)
    assert int((back != 0).sum()) == k


def test_stc_has_a_scale_per_tensor():
    one, tensors = (
        encoder("stc(0.25)"),
        [torch.tensor([1.0, -8.0, 2.0, 0.5]), torch.tensor([0.1, 0.2, -0.4, 0.3] * 2)],
    )
    back = one.decode(one.encode(tensors, seeded(0)), [t.shape for t in tensors])
    assert back[0].tolist() == [0.0, -8.0, 0.0, 0.0]
    torch.testing.assert_close(back[1], torch.tensor([0.0, 0.0, -0.4, 0.0] * 2), rtol=2**-8, atol=0)


@pytest.mark.parametrize("link", ["int4(block=64)", "int2(block=64)", "ternary(block=64)"])
def test_stochastic_rounding_is_unbiased_and_off_by_at_most_one_step(link):
    draws, one = 20_000, encoder(link)
    x = torch.cat([torch.linspace(-1, 1, 59), torch.tensor([0.0, 1e-4, -1e-4, 0.5, 0.33])])
    values = through(link, x.expand(draws, -1).contiguous(), 3)
    step = 2 / (one.levels - 1)
    assert float((values - x).abs().max()) <= step * 1.01
    # One draw has standard deviation at most half a step.
    assert float((values.double().mean(0) - x).abs().max()) < 5 * step / 2 / math.sqrt(draws)


@pytest.mark.parametrize("step", [0.1, 0.5, 1.0, 4.0])
def test_a_grid_is_unbiased_and_off_by_less_than_its_unit(step):
    draws = 20_000
    x = torch.cat([torch.linspace(-3, 3, 59), torch.tensor([0.0, 1e-4, -1e-4, 0.5, 0.33])])
    values = through(f"grid({step})", x.expand(draws, -1).contiguous(), 3)
    unit = 2.0 ** round(math.log2(step * float(x.square().mean().sqrt())))
    assert float((values - x).abs().max()) <= unit
    assert torch.equal(values, unit * (values / unit).round())
    assert float((values.double().mean(0) - x).abs().max()) < 5 * unit / 2 / math.sqrt(draws)


@pytest.mark.parametrize(
    ("n", "base", "digits", "listed"),
    [
        ([0, -1, 0, 1, 0, 0, 0, 1], 4, [0 + 4 * 1 + 16 * 0 + 64 * 2, 64 * 2], []),
        ([0, -1, 2, 1, -2, 1], 6, [0 + 6 * 1 + 36 * 4, 2 + 6 * 3 + 36 * 2], []),
        ([-3, 7, 5, -8, 4, -6], 16, [5 + 16 * 14, 10 + 16 * 15, 8 + 16 * 11], [15]),
    ],
)
def test_a_grid_by_hand(n, base, digits, listed):
    """z of 0, -1, 1, -2, ... is 0, 1, 2, 3, ..."""
    x = torch.tensor(n) * 2.0**-5
    parts = encoder("grid(0)").encode([x], seeded(0))
    assert parts["exponents"].tolist() == [-5]
    assert parts["base"].tolist() == [base]
    raw = [zlib.decompress(parts[name].numpy().tobytes(), wbits=-15) for name in ("digits", "listed")]
    assert list(raw[0]) == digits
    assert list(raw[1]) == [z >> shift & 255 for shift in (0, 8, 16) for z in listed]
    assert torch.equal(through("grid(0)", x), x)


def test_a_grid_halves_its_step_on_the_downlink_only():
    one = encoder("grid(0.5, halve=100)")
    assert [one.at(t).step for t in (0, 100, 400)] == [0.5, 0.25, 0.5 / 16]
    assert encoder("grid(0.5)").at(400).step == 0.5
    assert Link(down="grid(0.5, halve=100)").downlink.text == "grid(0.5, halve=100.0)"
    with pytest.raises(ConfigError, match="halve is for the downlink"):
        Link(up="grid(0.5, halve=100)")


@given(
    st.lists(st.integers(-(2**23) + 1, 2**23 - 1), min_size=1, max_size=40),
    st.integers(-60, 60),
    st.integers(0, 3),
)
def test_a_grid_of_step_0_is_exact(n, exponent, power):
    """Multiples of a power of two below 2^23, also such whose common divisor is larger."""
    x = torch.tensor(n, dtype=torch.float32).mul(2**power * 2.0**exponent)
    assert exactly([x])
    assert torch.equal(through("grid(0)", x), x)
    assert not exactly([torch.tensor([1.0, 2.0**-23])])


def test_a_grid_takes_little_more_than_the_entropy_of_its_numbers():
    for spread in (0.3, 0.5, 1.0, 3.0):
        n = torch.randn(200_000, generator=seeded(0)).mul(spread).round()
        shares = torch.unique(n, return_counts=True)[1] / len(n)
        entropy = -float((shares * shares.log2()).sum())
        bits = 8 * data_bytes(encoder("grid(0)").encode([n], seeded(0))) / len(n)
        assert entropy <= bits < 1.1 * entropy + 0.05


def test_a_block_scale_is_never_below_the_largest_number():
    """Otherwise the largest number would be clipped, which is a bias."""
    x = torch.rand(64 * 128, generator=seeded(0)) * torch.logspace(-30, 30, 64).repeat_interleave(128)
    scales = encoder("int4").encode([x], seeded(0))["scales"].float()
    largest = x.view(64, 128).amax(1)
    assert bool(((scales >= largest) & (scales <= largest * (1 + 2**-7))).all())


@pytest.mark.parametrize(
    ("link", "error", "kept"),
    [
        ("eden(block=256)", math.pi / 2 - 1, 1.0),
        ("eden(block=256, unbiased=False)", 1 - 2 / math.pi, 2 / math.pi),
        ("eden(bits=2, block=256)", 0.1331, 1.0),
        ("eden(bits=2, block=256, unbiased=False)", 0.1175, 1 - 0.1175),
        ("eden(bits=4, block=256)", 0.0096, 1.0),
    ],
)
def test_eden_has_the_error_and_the_bias_of_its_paper(link, error, kept):
    """||value - x||^2 / ||x||^2 is pi / 2 - 1 for one bit; E[value] = x with the unbiased scale, else it shrinks."""
    draws = 4_000
    x = torch.randn(256, generator=seeded(0)) * torch.linspace(0.1, 2, 256)
    values = through(link, x.expand(draws, -1).contiguous(), 2).double()
    norm = float(x.double().square().sum())
    assert float((values - x).square().sum(1).mean()) / norm == pytest.approx(error, rel=0.06)
    bias = values.mean(0) - kept * x
    assert float(bias.square().sum().sqrt()) / math.sqrt(norm) < 0.03


def test_the_transform_is_hadamards_matrix_and_its_own_inverse():
    matrix = np.array([[1.0]])
    for _ in range(5):
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    x = torch.randn(3, 32, generator=seeded(0))
    expected = x.numpy() @ matrix / math.sqrt(32)
    torch.testing.assert_close(hadamard(x), torch.from_numpy(expected).float())
    torch.testing.assert_close(hadamard(hadamard(x)), x)


def test_one_bit_after_a_rotation_equals_numpy():
    """value = ||x||^2 / ||H D x||_1 times D H sign(H D x)"""
    x = torch.randn(64, generator=seeded(0))
    parts = encoder("eden(block=64)").encode([x], seeded(5))
    signs = random_signs(int(parts["seed"]), 64, x.device).double().numpy()
    matrix = np.array([[1.0]])
    for _ in range(6):
        matrix = np.kron([[1, 1], [1, -1]], matrix) / math.sqrt(2)
    turned = matrix @ (signs * x.double().numpy())
    scale = float((x.double() ** 2).sum()) / np.abs(turned).sum()
    expected = signs * (matrix @ (scale * np.sign(turned)))
    back = encoder("eden(block=64)").decode(parts, [x.shape])[0]
    torch.testing.assert_close(back.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_powersgd_finds_the_best_matrix_of_its_rank():
    left, right = (torch.linalg.qr(torch.randn(40, 40, generator=seeded(i))).Q for i in (0, 1))
    spectrum = 2.0 ** -torch.arange(40.0)
    x = (left * spectrum) @ right.T
    error = float((through("powersgd(rank=3)", x) - x).norm())
    assert error <= 1.05 * float(spectrum[3:].norm())
    exact = x - (left[:, 3:] * spectrum[3:]) @ right[:, 3:].T
    assert float((through("powersgd(rank=3)", exact) - exact).norm()) < 0.01 * float(exact.norm())


@each_link
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-20, 1e20, 1e37])
def test_extreme_tensors_stay_finite(link, scale):
    x = torch.randn(20, 20, generator=seeded(0)).clamp(-3, 3) * scale
    back = through(link, x)
    assert bool(back.isfinite().all())
    if not scale:
        assert not bool(back.any())


@each_link
@pytest.mark.parametrize("value", [math.nan, math.inf, -3.4e38])
@pytest.mark.parametrize("size", [8, 400])
def test_values_that_no_link_can_send_are_rejected_by_name(link, value, size):
    x = torch.ones(size)
    x[3] = value
    with pytest.raises(UpdateRejected, match=r"tensor 'fc.weight' spans"):
        make_message({"fc.weight": x}, HEADER, link, seeded(0))


@each_link
def test_a_generator_is_needed_and_decides_everything(link):
    state = {"w": torch.randn(30, 30, generator=seeded(0))}
    with pytest.raises(UsageError, match=r"torch\.Generator"):
        make_message(state, HEADER, link)
    first, second, third = (bytes(make_message(state, HEADER, link, seeded(s))) for s in (1, 1, 2))
    assert first == second
    assert (first == third) == link.startswith(("sign", "topk", "stc"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fp4", "up is 'fp4': expected one of float32"),
        ("int4(16, 2, 3)", r"expected int4\(block"),
        ("int4(blocks=3)", "blocks"),
        ("int4(block=8)", "block is 8: expected 16 to"),
        ("int4(block=a)", "with Python literals"),
        ("eden(block=100)", "power of two"),
        ("eden(bits=3)", "bits is 3: expected 1, 2 or 4"),
        ("topk", "fraction"),
        ("topk(1.5)", "fraction is 1.5: expected a number above 0 and below 1"),
        ("powersgd(rank=0)", "rank is 0"),
        ("grid", "step"),
        ("grid(-1)", "step is -1: expected 0 to 8"),
        ("grid(0.5, halve=0)", "halve is 0: expected the rounds"),
        ("float32(feedback=True)", "feedback"),
        ("sign(", "sign"),
    ],
)
def test_a_wrong_link_is_rejected(text, complaint):
    for make in (lambda: Link(up=text), lambda: parse_encoding(text, "up")):
        with pytest.raises(ConfigError, match=complaint):
            make()
