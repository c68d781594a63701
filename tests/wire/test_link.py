"""Properties of the link: what each precision does to a tensor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.errors import ConfigError, UpdateRejected, UsageError
from fedpara.wire import Link
from fedpara.wire.encoders import rounding

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quantize(
    name: str, x: torch.Tensor, precision: str, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, float]:
    sent, scales = rounding.quantize({name: x}, precision, generator)
    return sent[name], scales.get(name, 0.0)


def dequantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    return rounding.dequantize({"w": x}, {"w": scale})["w"]


def test_link_lists_the_known_precisions() -> None:
    assert Link() == Link(up="float32", down="float32")
    assert Link(up="float16").down == "float32"
    with pytest.raises(ConfigError, match="up is 'fp16': expected one of float32, float16, bfloat16, int8"):
        Link(up="fp16")
    with pytest.raises(ConfigError, match="down is 'float64'"):
        Link(down="float64")
    with pytest.raises(ConfigError, match="int4"):
        quantize("w", torch.ones(1), "int4")


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, seed=st.integers(0, 2**31), exponent=st.integers(-44, 37))
def test_int8_is_off_by_at_most_one_step(shape: tuple[int, ...], seed: int, exponent: int) -> None:
    x = torch.randn(shape, generator=seeded(seed)) * 10.0**exponent
    q, scale = quantize("w", x, "int8", seeded(seed + 1))
    assert q.dtype == torch.int8
    assert q.shape == x.shape
    back = dequantize(q, scale)
    assert back.dtype == torch.float32
    assert bool(((back - x).abs() <= scale * (1 + 1e-5)).all())
    if x.numel():
        assert scale == pytest.approx(
            max(float(x.abs().max()) / 127, torch.finfo(torch.float32).tiny), rel=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_int8_is_unbiased(dtype: torch.dtype) -> None:
    draws = 20_000
    x = torch.cat([torch.linspace(-1, 1, 37), torch.tensor([0.0, 1e-4, -1e-4])]).to(dtype)
    q, scale = quantize("w", x.expand(draws, -1), "int8", seeded(3))
    mean = dequantize(q, scale).double().mean(0)
    # One draw has standard deviation at most s / 2.
    assert float((mean - x.double()).abs().max()) < 5 * (scale / 2) / math.sqrt(draws)
    assert int(q[:, 37].abs().max()) == 0, "zero stays zero in every draw"


def test_int8_depends_on_its_generator_only() -> None:
    x = torch.randn(100, generator=seeded(0))
    state = torch.get_rng_state()
    first, second, other = (quantize("w", x, "int8", seeded(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(UsageError, match="generator"):
        quantize("w", x, "int8")


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, -3.5, 1e38])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3)])
def test_int8_handles_zero_empty_scalar_and_subnormal(value: float, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, value)
    q, scale = quantize("w", x, "int8", seeded(0))
    back = dequantize(q, scale)
    assert back.shape == x.shape
    torch.testing.assert_close(back, x, rtol=1e-5, atol=scale if value < 1e-37 else 0.0)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (4, 3)])
def test_casts_round_to_the_nearest(precision: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=seeded(0))
    cast, scale = quantize("w", x, precision)
    assert scale == 0
    assert cast.dtype == getattr(torch, precision)
    assert torch.equal(dequantize(cast, scale), x.to(cast.dtype).float())


@pytest.mark.parametrize(
    ("precision", "value"),
    [
        ("float16", 65520.0),
        ("float16", -1e6),
        ("float16", math.nan),
        ("bfloat16", 3.4e38),
        ("bfloat16", math.inf),
        ("int8", math.nan),
        ("int8", -math.inf),
        ("int8", 3.4028e38),
    ],
)
def test_values_out_of_range_are_rejected_by_name(precision: str, value: float) -> None:
    x = torch.tensor([0.5, value, -0.5])
    with pytest.raises(UpdateRejected, match=rf"'features.3.bias'.*{precision}"):
        quantize("features.3.bias", x, precision, seeded(0))


def test_int8_rejects_float64_beyond_float32() -> None:
    with pytest.raises(UpdateRejected, match="'w'"):
        quantize("w", torch.tensor([1e300], dtype=torch.float64), "int8", seeded(0))


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8"])
def test_integers_are_sent_unchanged(precision: str) -> None:
    for counter in (
        torch.tensor(2**40 + 1),
        torch.tensor([True, False]),
        torch.tensor([-5], dtype=torch.int8),
    ):
        wire, scale = quantize("n", counter, precision, seeded(0))
        assert wire.dtype == counter.dtype
        assert torch.equal(dequantize(wire, scale), counter)


def test_float32_keeps_float64_and_widens_halves() -> None:
    for dtype, expected in ((torch.float64, torch.float64), (torch.float16, torch.float32)):
        x = torch.tensor([1 / 3], dtype=dtype)
        wire, scale = quantize("w", x, "float32")
        assert wire.dtype == expected
        assert torch.equal(dequantize(wire, scale), x.to(expected))
