"""BatchNorm on padded batches: the numbers of torch's own layer on the batch without its padding."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.engines.batched.kernels.masked_norm import masked_norms
from fedpara.engines.memory import InMemory
from fedpara.engines.program import make_program
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.engines.simulate import build_engine

CHANNELS, WIDTH = 3, 6
SHAPES = {
    nn.BatchNorm1d: ((), (5,)),
    nn.BatchNorm2d: ((4, 3),),
    nn.BatchNorm3d: ((2, 2, 3),),
}
KINDS = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]
BATCHED = Settings(rounds=1, cohort=2, engine="batched")


def pair(kind, momentum=0.1, affine=True, track=True, dtype=torch.float32):
    """torch's layer, and a copy of it that sees padded batches."""
    own = kind(CHANNELS, momentum=momentum, affine=affine, track_running_stats=track, dtype=dtype)
    if affine:
        nn.init.normal_(own.weight)
        nn.init.normal_(own.bias)
    masked = deepcopy(own)
    for norm in masked_norms(masked).values():
        norm.width = WIDTH
    return own, masked


def assert_near(a, b, tolerance=1e-5):
    assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance), (a - b).abs().max()


@settings(deadline=None, max_examples=60)
@given(
    of=st.sampled_from(KINDS),
    size=st.integers(2, WIDTH),
    momentum=st.sampled_from([0.1, 0.0, 1.0, None]),
    affine=st.booleans(),
    track=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    offset=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_outputs_gradients_and_statistics_are_those_of_torch_without_padding(
    of, size, momentum, affine, track, dtype, offset, seed
):
    torch.manual_seed(seed)
    own, masked = pair(of[0], momentum, affine, track, dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    masked.size.fill_(size)
    for _ in range(2):
        x = torch.randn(WIDTH, CHANNELS, *of[1], dtype=dtype) + offset
        weights = torch.randn_like(x)[:size]
        padded, plain = x.clone().requires_grad_(), x[:size].clone().requires_grad_()
        a, b = own(plain), masked(padded)[:size]
        assert_near(a, b, tolerance)
        (a * weights).sum().backward()
        (b * weights).sum().backward()
        assert_near(plain.grad, padded.grad[:size], tolerance)
        assert not padded.grad[size:].any()
    for name, value in own.state_dict().items():
        assert_near(value, masked.state_dict()[name], tolerance)
    for name, parameter in own.named_parameters():
        assert_near(parameter.grad, masked.get_parameter(name).grad, 10 * tolerance)
    own.eval(), masked.eval()
    assert torch.allclose(own(x), masked(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_lanes_of_different_sizes_and_16_bit_inputs(momentum):
    torch.manual_seed(0)
    own, masked = pair(nn.BatchNorm2d, momentum)
    x, sizes = torch.randn(2, WIDTH, CHANNELS, 4, 4).bfloat16(), torch.tensor([2, 5])
    state = {name: torch.stack([tensor] * 2) for name, tensor in masked.state_dict().items()}

    def run(state, x, size):
        given = {name: tensor.clone() for name, tensor in state.items()}
        output = functional_call(masked, {**given, "size": size}, x)
        return output, given

    output, state = vmap(run)(state, x, sizes)
    assert output.dtype == torch.bfloat16
    for lane, size in enumerate(sizes.tolist()):
        expected = deepcopy(own)
        assert_near(expected(x[lane, :size].float()), output[lane, :size], 2e-2)
        for name, value in expected.state_dict().items():
            assert_near(value, state[name][lane], 1e-5)


def test_an_empty_lane_has_finite_gradients():
    masked = pair(nn.BatchNorm1d, track=False)[1]
    x = torch.randn(WIDTH, CHANNELS)
    got = grad(lambda x: functional_call(masked, {"size": torch.tensor(0)}, x).square().sum())(x)
    assert got.isfinite().all()


def test_rows_that_are_not_examples_use_torchs_own_layer():
    own, masked = pair(nn.BatchNorm1d)
    x = torch.randn(2 * WIDTH, CHANNELS)
    assert torch.equal(own(x), masked(x))


def mlp(momentum=0.1, **options):
    norm = nn.BatchNorm1d(16, momentum=momentum, **options)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm, nn.ReLU(), nn.Linear(16, 10))


class Folded(nn.Module):
    """BatchNorm over rows of images: its first dimension is not the batch's."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(8), nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(self.norm(x.reshape(-1, 8)).reshape(len(x), 64))


NETWORKS = {
    "mlp": mlp,
    "cumulative": lambda: mlp(None),
    "not affine": lambda: mlp(affine=False),
    "no statistics": lambda: mlp(track_running_stats=False),
    "resnet18": lambda: models.resnet18(10, channels=1, shrink=16),
}


@pytest.mark.parametrize("local", [{}, {"optimizer": "adamw", "lr": 0.01}, {"momentum": 0.9}])
@pytest.mark.parametrize("network", NETWORKS)
def test_uneven_batches_train_alike_in_both_engines(digits, network, local):
    if network == "resnet18" and local:
        pytest.skip("one optimizer is enough for the slow model")
    """In float64, and few steps of the deep network: it amplifies rounding fiftyfold in each step."""
    torch.manual_seed(0)
    model = NETWORKS[network]().double()
    sizes, start = (11, 6, 15, 8), 0
    clients = []
    for size in sizes:
        clients.append(list(range(start, start + size)))
        start += size
    length = {"steps": 3} if network == "resnet18" else {"epochs": 2}
    method = algorithms.fedavg(**{"lr": 0.05, "batch_size": 4, **length, **local})
    images = digits[0].part(slice(start))
    train = data.Examples(images.normalised().double(), images.targets, 10)
    federation = fp.FederatedData(train, clients)
    runs = [
        fp.simulate(fp.Task(model), federation, method, rounds=1, cohort=4, engine=engine, device="cpu")
        for engine in ("sequential", "batched")
    ]
    assert runs[1].engine.startswith("batched"), runs[1].engine
    states = [run.progress.x | run.progress.buffers for run in runs]
    for name, value in states[0].items():
        assert_near(value, states[1][name], 1e-7)


def test_batch_norm_over_folded_rows_still_runs_sequentially(digits):
    model = Folded()
    session = Session(make_program(model), algorithms.fedavg(lr=0.1, batch_size=4), fp.Link(), 0)
    federation = fp.FederatedData(digits[0], [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]])
    engine = build_engine(BATCHED, session, fp.Task(model), federation, InMemory())
    assert "short batches are padded" in engine.why
