"""GroupNorm, ReLU and pooling as one op equal torch's layers, and are used only where nothing sees between them."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import group_norm, max_pool2d, relu

from fedpara.engines.batched.kernels import norm_ops
from fedpara.engines.batched.kernels.norm_ops import LanesSequential, block, halves, use_fused_norms
from fedpara.engines.batched.kernels.ops import OPS, pays_on

LANES, GROUPS, EPS = 3, 4, 1e-5
gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and pays_on(torch.device("cuda"))), reason="needs a Hopper GPU and Triton"
)
pooled = pytest.mark.parametrize("pool", [False, True])
moved = pytest.mark.parametrize("moved", [False, True])


def drawn(batch, c, h, w, pool, device="cpu", dtype=torch.float64):
    """x, offset, weight, bias and dy as the op takes them."""
    torch.manual_seed(0)
    out = (h // 2, w // 2) if pool else (h, w)
    x, dy = (torch.randn(LANES, batch, *s, c, device=device).to(dtype).movedim(-1, 2) for s in ((h, w), out))
    each = torch.randn(3, LANES, c, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return x + 0.5, *each, dy


def by_torch(x, offset, weight, bias, dy, groups, pool):
    """y, dx, doffset, dweight, dbias of torch's layers in float64; the norm's output is rounded as x is."""
    inputs = [t.double().requires_grad_() for t in (x, offset, weight, bias)]
    lanes = []
    for image, o, w, b in zip(*inputs, strict=True):
        z = group_norm(image + o[:, None, None], groups, w, b, EPS)
        z = relu(z + (z.to(x.dtype).double() - z).detach())
        lanes.append(max_pool2d(z, 2) if pool else z)
    y = torch.stack(lanes)
    return y.detach(), *torch.autograd.grad(y, inputs, dy.double())


@pooled
@moved
@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (0, None, None, None), (2, 1, 1, 1)], ids=str)
def test_the_op_equals_torchs_layers_under_vmap(pool, moved, mapped):
    inputs = drawn(2, 8, 4, 6, pool)
    if not moved:
        inputs[1].zero_()
    dy = inputs[4]
    given = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(inputs[:4], mapped, strict=True)]
    each = [t[:1].expand_as(t) if dim is None else t for t, dim in zip(inputs[:4], mapped, strict=True)]

    def one(x, offset, weight, bias):
        return OPS.lanes_norm_relu(x, offset if moved else None, weight, bias, GROUPS, EPS, pool)[0]

    def loss(x, offset, weight, bias, dy):
        return (one(x, offset, weight, bias) * dy).sum()

    y, *expected = by_torch(*each, dy, GROUPS, pool)
    torch.testing.assert_close(vmap(one, mapped)(*given), y)
    found = vmap(grad(loss, argnums=(0, 1, 2, 3)), (*mapped, 0))(*given, dy)
    if not moved:
        expected[1].zero_()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
    )


def calls(monkeypatch):
    """`pool`, and whether there is an offset, of every call of the op; every norm fits."""
    seen = []
    monkeypatch.setattr(norm_ops, "fits", lambda norm, input, dtype: True)
    monkeypatch.setattr(norm_ops, "OPS", _Spy(seen))
    return seen


class _Spy:
    def __init__(self, seen):
        self.seen = seen

    def lanes_norm_relu(self, x, offset, *rest):
        self.seen.append((rest[-1], offset is not None))
        return OPS.lanes_norm_relu(x, offset, *rest)

    def lanes_norm_relu_backward(self, *given):
        return OPS.lanes_norm_relu_backward(*given)


def test_a_sequential_fuses_the_layers_in_a_row(monkeypatch):
    theirs, x = net(), torch.randn(2, 3, 8, 8)
    ours = use_fused_norms(deepcopy(theirs))
    seen = calls(monkeypatch)
    torch.testing.assert_close(ours(x), theirs(x))
    assert seen == [(True, True), (False, True)]
    state = {name: p.detach() + 0.1 * torch.randn(LANES, *p.shape) for name, p in theirs.named_parameters()}

    def step(model):
        return vmap(grad(lambda s, x: functional_call(model, s, (x,)).square().sum()), (0, None))(state, x)

    for name, expected in step(theirs).items():
        torch.testing.assert_close(step(ours)[name], expected, rtol=1e-3, atol=1e-3)


def test_what_a_hook_or_a_loop_over_the_layers_sees_stays(monkeypatch):
    theirs, x = net(), torch.randn(2, 3, 8, 8)
    ours = use_fused_norms(deepcopy(theirs))
    seen = calls(monkeypatch)
    out = []
    ours[1].register_forward_hook(lambda module, args, output: out.append(output))
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(out[0], theirs[1](theirs[0](x)))
    assert seen == [(False, True)]
    torch.testing.assert_close(ours[1](ours[0](x)), theirs[1](theirs[0](x)))


def test_a_convolution_with_a_hook_keeps_its_bias(monkeypatch):
    theirs, x = net(), torch.randn(2, 3, 8, 8)
    ours = use_fused_norms(deepcopy(theirs))
    seen, out = calls(monkeypatch), []
    ours[0].register_forward_hook(lambda module, args, output: out.append(output))
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(out[0], theirs[0](x))
    assert seen == [(True, False), (False, True)]


def test_an_odd_image_is_pooled_by_torch(monkeypatch):
    theirs, x = net(), torch.randn(2, 3, 7, 6)
    seen = calls(monkeypatch)
    torch.testing.assert_close(use_fused_norms(deepcopy(theirs))(x), theirs(x))
    assert seen == [(False, True), (False, True)]


def test_on_a_cpu_nothing_is_fused():
    theirs, x = net(), torch.randn(2, 3, 8, 8)
    ours = use_fused_norms(deepcopy(theirs))
    assert isinstance(ours, LanesSequential)
    assert isinstance(ours[4], LanesSequential)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(
    "other",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2),
    ],
    ids=str,
)
def test_other_poolings_are_not_fused(other):
    assert halves(nn.MaxPool2d(2))
    assert halves(nn.MaxPool2d((2, 2), (2, 2)))
    assert not halves(other)


def test_blocks_are_whole_groups_that_fit():
    assert block(64, 32, 32, 2) == 16
    assert block(512, 2, 2, 16) == 512
    assert block(512, 4, 4, 16) == 512
    assert block(64, 224, 224, 2) == 16
    assert block(96, 8, 8, 3) is None


@gpu
@pytest.mark.gpu
@pooled
@moved
@pytest.mark.parametrize(
    "size",
    [
        (64, 32, 32, 32),
        (128, 16, 16, 32),
        (256, 8, 8, 32),
        (512, 4, 4, 32),
        (512, 2, 2, 32),
        (64, 6, 10, 4),
        (32, 48, 66, 8),
        (64, 64, 64, 8),
        (64, 8, 8, 1),
    ],
    ids=str,
)
def test_the_kernels_equal_float64(size, pool, moved):
    *shape, groups = size
    x, offset, weight, bias, dy = drawn(3, *shape, pool, "cuda", torch.bfloat16)
    given = x, offset if moved else None, weight, bias
    y, stats, totals = OPS.lanes_norm_relu(*given, groups, EPS, pool)
    dx, sums = OPS.lanes_norm_relu_backward(x, dy, *given[1:], stats, totals, groups, pool)
    dweight, dbias, doffset = sums.unbind(1)
    expected = by_torch(x, offset if moved else 0 * offset, weight, bias, dy, groups, pool)
    for ours, theirs, limit in zip(
        (y, dx, doffset, dweight, dbias), expected, (3e-3, 2e-2, 1e-2, 1e-2, 1e-2), strict=True
    ):
        assert float((ours.double() - theirs).norm()) < limit * float(theirs.norm())
