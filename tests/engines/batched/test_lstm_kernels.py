"""Properties of the lane recurrence: it equals the unrolled LSTM in every lane, under every transform."""

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, vmap

import fedpara as fp
from fedpara import models
from fedpara.engines.batched.kernels.lstm import (
    KERNEL_SIZES,
    _fused_cell,
    _fused_cell_backward,
    recur,
    recur_in_kernels,
    use_lane_lstm,
)
from fedpara.engines.batched.kernels.ops import OPS, pays_on
from fedpara.models.lstm import unrolled

T, LANES, B, H = 5, 3, 4, 6


def drawn(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(T, LANES, B, 4 * H, generator=generator)
    return p.to(device), 0.5 * torch.randn(LANES, 4 * H, H, generator=generator).to(device)


def both(step, p, w, in_dims=(1, 0)):
    return [
        vmap(grad(lambda p, w, f=f: step(f(p, w)), argnums=(0, 1)), in_dims)(p, w) for f in (recur, unrolled)
    ]


def some_loss(h):
    """A loss in which every h counts, the last ones more."""
    return (h.square() * torch.arange(1.0, T + 1, device=h.device)[:, None, None]).sum()


def test_values_equal_the_unrolled_lstm():
    p, w = drawn()
    for lane in range(LANES):
        torch.testing.assert_close(recur(p[:, lane], w[lane]), unrolled(p[:, lane], w[lane]))
    torch.testing.assert_close(vmap(recur, (1, 0), 1)(p, w), vmap(unrolled, (1, 0), 1)(p, w))


@pytest.mark.parametrize("in_dims", [(1, 0), (None, 0), (1, None), (3, 2)], ids=str)
def test_gradients_over_any_mapped_inputs(in_dims):
    p, w = drawn()
    given = [
        tensor.select(lanes, 0) if dim is None else tensor.movedim(lanes, dim)
        for tensor, lanes, dim in zip((p, w), (1, 0), in_dims, strict=True)
    ]
    for ours, theirs in zip(*both(some_loss, *given, in_dims), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_derivative_equals_finite_differences():
    p, w = drawn()
    p, w = (tensor.double().contiguous().requires_grad_() for tensor in (p[:3, :2, :2], w[:2]))
    assert torch.autograd.gradcheck(lambda p, w: OPS.lanes_lstm(p, w)[0], (p, w))


@pytest.mark.parametrize("scheme", [None, fp.FedPara(gamma=0.5)])
def test_a_models_gradients_are_the_same_with_it(scheme):
    torch.manual_seed(0)
    model = models.build("lstm-tiny", classes=9, shape=(7,))
    if scheme is not None:
        fp.factorize(model, scheme)
        model = fp.merge(model)
    state = {name: torch.stack([t, 1.1 * t]) for name, t in model.state_dict().items()}
    text, target = torch.randint(0, 9, (2, 3, 7)), torch.randint(0, 9, (2, 3))

    def gradients():
        def loss(state, text, target):
            return torch.nn.functional.cross_entropy(functional_call(model, state, (text,)), target)

        return vmap(grad_and_value(loss))(state, text, target)

    expected = gradients()
    use_lane_lstm(model)
    assert model.layers[0].recurrence is recur
    assert models.build("lstm-tiny", classes=9, shape=(7,)).layers[0].recurrence is unrolled
    torch.testing.assert_close(gradients(), expected)


def test_autocast_leaves_the_recurrence_in_float32():
    p, w = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        assert recur(p[:, 0].bfloat16(), w[0]).dtype == torch.float32
        ours = vmap(grad(lambda w: recur(p[:, 0], w).sum()))(w)
    torch.testing.assert_close(ours, vmap(grad(lambda w: unrolled(p[:, 0], w).sum()))(w))


def test_in_16_bits_only_h_and_the_products_are_rounded():
    p, w = drawn()
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # whatever p comes in: a bias added to it may have made it float32
        assert recur_in_kernels(p[:, 0], w[0]).dtype == torch.bfloat16
    p = p.bfloat16()
    _, c, gates = OPS.lanes_lstm(p, w.bfloat16())
    assert c.dtype == gates.dtype == torch.float32
    ours, exact = (
        vmap(grad(lambda p, w, f=f: some_loss(f(p, w).float()), argnums=(0, 1)), (1, 0))(p, w)
        for f in (recur_in_kernels, recur)
    )
    assert [tensor.dtype for tensor in ours] == [torch.bfloat16, torch.float32]
    for rounded, value in zip(ours, exact, strict=True):
        torch.testing.assert_close(rounded.float(), value.float(), rtol=0.05, atol=0.05)


def test_without_autocast_the_kernels_are_not_used():
    p, w = drawn()
    assert torch.equal(recur_in_kernels(p[:, 0], w[0]), recur(p[:, 0], w[0]))


@pytest.mark.parametrize(("hidden", "expected"), [(KERNEL_SIZES[0], recur_in_kernels), (33, recur)])
def test_a_layer_uses_the_kernels_if_its_size_fits(hidden, expected):
    model = fp.factorize(models.lstm(9, 9, 4, hidden, 2, True), fp.FedPara(gamma=0.5))
    assert {layer.recurrence for layer in use_lane_lstm(model, kernels=True).layers} == {expected}


def test_the_fused_cells_exist_only_on_a_gpu():
    gates, c = torch.zeros(LANES, B, 4 * H), torch.zeros(LANES, B, H)
    for cell, given in ((_fused_cell, (gates, gates, c)), (_fused_cell_backward, (c, c, c, c, gates))):
        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            cell(*given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_fused_cell_gives_the_same_values():
    here, there = ([t.cpu() for t in both(some_loss, *drawn(device))[0]] for device in ("cpu", "cuda"))
    for ours, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and pays_on(torch.device("cuda"))), reason="needs a Hopper GPU and Triton"
)
@pytest.mark.parametrize("hidden", KERNEL_SIZES)
@pytest.mark.parametrize(("length", "lanes", "batch"), [(80, 3, 64), (5, 2, 21), (1, 1, 1)])
def test_the_kernels_equal_the_loop(length, lanes, batch, hidden):
    """In float16, which rounds less than bfloat16. Only h is rounded differently from the loop."""
    generator = torch.Generator("cuda").manual_seed(0)
    p, w, dh = (
        scale * torch.randn(shape, generator=generator, device="cuda")
        for scale, shape in (
            (1.0, (length, lanes, batch, 4 * hidden)),
            (hidden**-0.5, (lanes, 4 * hidden, hidden)),
            (1.0, (length, lanes, batch, hidden)),
        )
    )
    p, w, dh = p.half(), w.half(), dh.half()
    h, c, gates = OPS.lanes_lstm(p, w)
    exact = OPS.lanes_lstm(p.float(), w.float())
    for ours, loop in zip((h, c, gates), exact, strict=True):
        torch.testing.assert_close(ours.float(), loop, rtol=0, atol=5e-3)
    ours = OPS.lanes_lstm_backward(dh, h, c, gates, w)
    loops = OPS.lanes_lstm_backward(dh.float(), *exact, w.float())
    for gradient, loop in zip(ours, loops, strict=True):
        assert (gradient.float() - loop).norm() < 5e-3 * loop.norm() + 1e-6
