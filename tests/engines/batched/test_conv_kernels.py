"""Properties of the lane convolution: it equals torch's in every lane, under every transform."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import conv2d, relu

from fedpara.engines.batched.kernels.conv import (
    CHANNELS,
    OPS,
    ColumnsConv2d,
    LanesConv2d,
    ThinConv2d,
    fits,
    use_lane_convs,
)
from fedpara.engines.batched.kernels.ops import pays_on

LANES = 3
gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and pays_on(torch.device("cuda"))), reason="needs a Hopper GPU and Triton"
)
SHAPES = [  # c, o, h, w, kernel, batch
    (64, 64, 6, 5, (3, 3), 2),
    (64, 128, 2, 2, (3, 3), 4),
    (128, 64, 4, 4, (5, 3), 3),
    (64, 64, 1, 1, (3, 3), 2),
]
shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def drawn(shape, device="cpu", dtype=torch.float64):
    """x, w, bias and dy as the ops take them: images [lane, image, channel, h, w], kernels [lane, o, i, j, c]."""
    c, o, h, w, kernel, batch = shape
    torch.manual_seed(0)
    sizes = (LANES, batch, h, w, c), (LANES, o, *kernel, c), (LANES, o), (LANES, batch, h, w, o)
    x, w, bias, dy = (torch.randn(size, device=device).to(dtype) for size in sizes)
    return [x.movedim(-1, 2), w, bias, dy.movedim(-1, 2)]


def by_torch(x, w, bias, dy):
    """y, dx, dw and dbias, lane by lane, then stacked."""
    lanes = []
    for image, kernel, b, upstream in zip(x, w.movedim(-1, 2), bias, dy, strict=True):
        inputs = [t.clone().requires_grad_() for t in (image, kernel, b)]
        y = conv2d(*inputs, padding=tuple(k // 2 for k in kernel.shape[2:]))
        dx, dw, db = torch.autograd.grad(y, inputs, upstream)
        lanes.append((y.detach(), dx, dw.movedim(1, -1), db))
    return [torch.stack(same) for same in zip(*lanes, strict=True)]


@shape
def test_the_ops_equal_torchs_convolution_and_its_gradients(shape):
    x, w, bias, dy = drawn(shape)
    inputs = [t.clone().requires_grad_() for t in (x, w, bias)]
    y = OPS.lanes_conv2d(*inputs)
    found = (y.detach(), *torch.autograd.grad(y, inputs, dy))
    for ours, theirs in zip(found, by_torch(x, w, bias, dy), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert y.movedim(2, -1).is_contiguous()


@pytest.mark.parametrize(
    "mapped", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, None, 0), (2, 1, 1)], ids=str
)
def test_vmap_over_any_of_the_inputs(mapped):
    """All lanes share an unmapped input; the mapped dimension may be any."""
    inputs = drawn(SHAPES[0])[:3]
    given = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(inputs, mapped, strict=True)]
    each = [t[:1].expand_as(t) if dim is None else t for t, dim in zip(inputs, mapped, strict=True)]

    def one(x, w, bias):
        return OPS.lanes_conv2d(x, w, bias)

    torch.testing.assert_close(vmap(one, in_dims=mapped)(*given), OPS.lanes_conv2d(*each))

    def loss(x, w, bias):
        return one(x, w, bias).square().sum()

    ours = vmap(grad(loss, argnums=(0, 1, 2)), in_dims=mapped)(*given)
    theirs = vmap(grad(loss, argnums=(0, 1, 2)))(*each)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_of_inputs_that_have_lanes_already():
    inputs = [t.unflatten(0, (1, LANES)).expand(2, *t.shape) for t in drawn(SHAPES[0])[:3]]
    y = vmap(OPS.lanes_conv2d)(*inputs)
    torch.testing.assert_close(y[1], OPS.lanes_conv2d(*(t[0] for t in inputs)))


class Net(nn.Module):
    """A thin first layer, two lane convolutions, one of them without bias, and a strided one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.second = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.third = nn.Conv2d(64, 64, 5, padding="same")
        self.fourth = nn.Conv2d(64, 64, 3, stride=2, padding=1)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        x = relu(self.second(relu(self.first(x))))
        return self.head(relu(self.fourth(relu(self.third(x)))).mean((2, 3)))


def gradients(net, state, x, *, backend=None, device="cpu", autocast=False):
    def loss(parameters, x):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return functional_call(net, parameters, (x,)).float().square().mean()

    step = vmap(grad(loss))
    if backend is not None:
        step = torch.compile(step, dynamic=False, fullgraph=True, backend=backend)
    return step(state, x)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = Net()
    state = {name: p.detach() + 0.1 * torch.randn(LANES, *p.shape) for name, p in net.named_parameters()}
    return net, state, torch.randn(LANES, 2, 3, 4, 4)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_step_of_stacked_clients_has_the_same_gradients(problem, backend):
    net, state, x = problem
    ours = gradients(use_lane_convs(deepcopy(net)), state, x, backend=backend)
    for name, theirs in gradients(net, state, x).items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-4, atol=1e-5)


LAYERS = {
    ThinConv2d: [
        nn.Conv2d(3, 5, 3),
        nn.Conv2d(3, 5, 3, padding=1),
        nn.Conv2d(3, 5, 3, stride=2, padding=(0, 1)),
        nn.Conv2d(3, 5, 3, dilation=2),
        nn.Conv2d(3, 5, 3, bias=False),
    ],
    ColumnsConv2d: [
        nn.Conv2d(6, 5, 3, stride=2, padding=1),
        nn.Conv2d(6, 5, (3, 2), stride=(2, 3), padding=(0, 1), bias=False),
        nn.Conv2d(40, 5, 1),
        nn.Conv2d(40, 5, 1, stride=2),
        nn.Conv2d(3, 5, 4, stride=4),
    ],
}


@pytest.mark.parametrize(
    ("kind", "theirs"), [(kind, layer) for kind, layers in LAYERS.items() for layer in layers], ids=str
)
def test_a_layer_as_a_matrix_product_equals_torchs_convolution(kind, theirs):
    torch.manual_seed(0)
    theirs = deepcopy(theirs).double()
    ours = use_lane_convs(deepcopy(theirs))
    assert isinstance(ours, kind)
    x = torch.randn(4, theirs.in_channels, 8, 7, dtype=torch.float64)
    found = []
    for conv in (ours, theirs):
        image = x.clone().requires_grad_()
        y = conv(image)
        found.append((y, *torch.autograd.grad(y.square().sum(), [image, *conv.parameters()])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_reaches_the_ops(problem):
    net, state, x = problem
    seen = []
    ours = use_lane_convs(deepcopy(net))
    ours.second.register_forward_hook(lambda module, inputs, y: seen.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        functional_call(ours, {name: t[0] for name, t in state.items()}, (x[0],))
    assert seen == [torch.bfloat16]


def test_only_suitable_layers_are_replaced(problem):
    net = use_lane_convs(problem[0])
    assert [name for name, m in net.named_modules() if isinstance(m, LanesConv2d)] == ["second", "third"]
    assert [name for name, m in net.named_modules() if isinstance(m, ThinConv2d)] == ["first"]
    c = CHANNELS
    assert fits(nn.Conv2d(c, c, 1))
    assert fits(nn.Conv2d(c, 2 * c, (3, 5), padding=(1, 2)))
    for other in (
        nn.Conv2d(c, c, 3),
        nn.Conv2d(c, c, 2, padding=1),
        nn.Conv2d(c, c, 3, padding=1, stride=2),
        nn.Conv2d(c, c, 3, padding=2, dilation=2),
        nn.Conv2d(c, c, 3, padding=1, groups=2),
        nn.Conv2d(c, c, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(c, c + 1, 3, padding=1),
    ):
        assert not fits(other), other


def test_the_kernels_are_not_used_on_a_cpu():
    assert not pays_on(torch.device("cpu"))


def test_the_names_of_the_parameters_stay(problem):
    net = problem[0]
    before = {name: id(p) for name, p in net.named_parameters()}
    assert {name: id(p) for name, p in use_lane_convs(net).named_parameters()} == before


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, (64, 64, 32, 32, (3, 3), 10), (192, 320, 8, 8, (3, 3), 5), (256, 512, 4, 4, (3, 3), 64)],
    ids=str,
)
def test_the_gpu_kernels_equal_torchs_convolution(shape):
    """The inputs are bfloat16, so only sums and results are rounded."""
    x, w, bias, dy = drawn(shape, "cuda", torch.bfloat16)
    found = (
        OPS.lanes_conv2d(x, w, bias),
        OPS.lanes_conv2d_dx(dy, w),
        OPS.lanes_conv2d_dw(x, dy, list(w.shape[2:4])),
    )
    for ours, theirs in zip(found, by_torch(*(t.double() for t in (x, w, bias, dy))), strict=False):
        assert (ours - theirs).norm() < 5e-3 * theirs.norm()


@pytest.mark.gpu
@gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
def test_the_gpu_step_has_the_same_gradients(problem):
    """In bfloat16: as close to float32 as cuDNN's."""
    net, state, x = problem
    net, state, x = net.cuda(), {name: t.cuda() for name, t in state.items()}, x.cuda()
    exact = gradients(net, state, x, device="cuda")
    theirs = gradients(net, state, x, device="cuda", autocast=True)
    ours = gradients(
        use_lane_convs(deepcopy(net)), state, x, device="cuda", autocast=True, backend="inductor"
    )
    for name, right in exact.items():
        assert (ours[name] - right).norm() < 2 * (theirs[name] - right).norm() + 1e-3 * right.norm(), name
