"""On a GPU: steps as CUDA graphs give the rounds of steps that run, and a failed recording leaves torch usable."""

import random

import numpy as np
import pytest
import torch
from captured_rounds import METHODS, UNCAPTURED, Around, PerSize, SetsUp, Waits, images, network, played
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedpara as fp
from fedpara import algorithms, models
from fedpara.cuda_graphs import CudaGraphs
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import make_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DOUBLES = images(dtype=torch.float64) if torch.cuda.is_available() else None


class Run:
    """A recorder whose replays run the step: what remains is the difference that a graph makes."""

    def warm_up(self, step):
        step()

    def record(self, step):
        return step


def graphs(spare=True):
    return CudaGraphs(torch.device("cuda", torch.cuda.current_device()), spare)


def on_gpu(build, method, recorder, **options):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return played(build(), method, recorder, device="cuda:0", **options)


def double(build):
    return lambda: build().double()


def assert_near(one, other, tolerance):
    states = [rounds[-1].progress.x | rounds[-1].progress.buffers for rounds, *_ in (one, other)]
    for name, tensor in states[0].items():
        assert torch.allclose(tensor.cpu(), states[1][name].cpu(), rtol=tolerance, atol=tolerance), name
    for a, b in zip(one[0], other[0], strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, rel=10 * tolerance)
    for client in range(4):
        kept, again = (run[1].get(client) or {} for run in (one, other))
        assert kept.keys() == again.keys()
        for variable, state in kept.items():
            for name, tensor in state.items():
                here, there = tensor.cpu(), again[variable][name].cpu()
                assert torch.allclose(here, there, rtol=tolerance, atol=tolerance), (variable, name)


@pytest.mark.parametrize("method", METHODS)
def test_graphs_give_the_rounds_of_steps(method):
    given = {"examples": DOUBLES, "rounds": 3}
    plain = on_gpu(double(network), METHODS[method](), None, **given)
    captured = on_gpu(double(network), METHODS[method](), graphs(), **given)
    assert captured[2].why == "one client after another on cuda:0, float32, captured"
    assert plain[2].why == "one client after another on cuda:0, float32"
    assert_near(plain, captured, 1e-7 if "adam" in method else 1e-9)


@pytest.mark.parametrize("method", ["momentum", "adamw", "scaffold"])
def test_a_graph_gives_the_bits_of_its_step(method, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    run, captured = (
        on_gpu(lambda: models.mlp(192, 32, 5), METHODS[method](), recorder, examples=images(shape=(192,)))
        for recorder in (Run(), graphs())
    )
    assert captured[2].worker.captured.recorded
    assert_near(run, captured, 0.0)


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_batch_norm_uneven_batches_and_crops(augment):
    def build():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)).double()

    method = algorithms.fedavg(lr=0.05, batch_size=5, epochs=2)
    given = {"augment": augment, "examples": DOUBLES, "rounds": 3}
    plain, captured = (on_gpu(build, method, recorder, **given) for recorder in (None, graphs()))
    assert captured[2].worker.captured.recorded >= 4
    assert_near(plain, captured, 1e-9)


def test_random_layers_draw_the_same_numbers():
    def build():
        layers = [nn.Flatten(), nn.Linear(192, 8), nn.RReLU(), nn.AlphaDropout(0.3), nn.Linear(8, 5)]
        return nn.Sequential(*layers).double()

    plain, captured = (
        on_gpu(build, METHODS["sgd"](), recorder, examples=DOUBLES) for recorder in (None, graphs())
    )
    assert captured[2].worker.captured.recorded
    assert_near(plain, captured, 1e-9)


def test_bfloat16():
    plain, captured = (
        on_gpu(network, METHODS["momentum"](), recorder, precision="bfloat16")
        for recorder in (None, graphs())
    )
    assert captured[2].why.endswith("bfloat16, captured")
    assert_near(plain, captured, 2e-2)


@pytest.mark.parametrize("scheme", [fp.FedPara(gamma=0.3), fp.PFedPara(gamma=0.3)])
def test_factors(scheme):
    def build():
        return fp.factorize(network(), scheme, force=True).double()

    plain, captured = (
        on_gpu(build, METHODS["sgd"](), recorder, examples=DOUBLES) for recorder in (None, graphs())
    )
    assert captured[2].worker.captured.recorded
    assert_near(plain, captured, 1e-8)


@pytest.mark.parametrize("name", ["vgg16-tiny", "resnet18", "resnet18-gn", "lstm"])
def test_the_librarys_models_are_captured(name):
    method = algorithms.fedavg(lr=1e-3, batch_size=4, epochs=2)
    shape = (80,) if name == "lstm" else (3, 32, 32)
    held = images(shape=shape)
    if name == "lstm":
        held = fp.data.Examples(torch.arange(44 * 80).view(44, 80) % 80, held.targets, 5)

    def build():
        return models.build(name, classes=80 if name == "lstm" else 5, shape=shape)

    plain, captured = (on_gpu(build, method, recorder, examples=held) for recorder in (None, graphs()))
    assert captured[2].why.endswith("captured")
    assert_near(plain, captured, 1e-3)


class DrawsTorch(Around):
    def before(self, x):
        return x * torch.rand(()).item()


class Copies(Around):
    """Makes a tensor on the host in every step, and moves it."""

    def before(self, x):
        return x * torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1).to(x.device)


@pytest.mark.parametrize("build", [*UNCAPTURED, DrawsTorch, Copies])
def test_what_a_graph_would_lose_trains_step_by_step(build):
    said = {
        **UNCAPTURED,
        DrawsTorch: "a step draws from torch's generator on the CPU",
        Copies: "not captured",
    }
    plain, captured = (
        on_gpu(double(build), METHODS["sgd"](), recorder, examples=DOUBLES) for recorder in (None, graphs())
    )
    assert not captured[2].worker.captured.recorded
    assert "not captured: " in captured[2].why
    if build is not Waits:  # CUDA's own words
        assert said[build] in captured[2].why
    if build is not DrawsTorch:  # the engine does not seed that generator
        assert_near(plain, captured, 1e-9)


@pytest.mark.parametrize("build", [SetsUp, PerSize])
def test_what_is_built_once_is_captured(build):
    plain, captured = (
        on_gpu(double(build), METHODS["sgd"](), recorder, examples=DOUBLES) for recorder in (None, graphs())
    )
    assert captured[2].why.endswith("captured")
    assert_near(plain, captured, 1e-9)


def test_a_failed_recording_leaves_torch_usable():
    class WaitsAndDraws(Waits):
        def forward(self, x):
            return super().forward(nn.functional.dropout2d(x, 0.2, self.training))

    here, one = torch.cuda.current_stream(), graphs()
    runs = [
        on_gpu(double(WaitsAndDraws), METHODS["sgd"](), recorder, examples=DOUBLES)
        for recorder in (None, one)
    ]
    assert "not captured: " in runs[1][2].why
    assert_near(*runs, 1e-9)
    assert torch.cuda.current_stream() == here
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    torch.rand(3, device="cuda")
    again = on_gpu(network, METHODS["sgd"](), one)  # the same recorder, its pool and its stream
    assert again[2].why.endswith("captured")


def test_a_recording_that_would_take_too_much_memory_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 30))
    captured = on_gpu(network, METHODS["sgd"](), graphs())
    assert "GB of the GPU's memory are free" in captured[2].why
    assert not captured[2].worker.captured.recorded


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_a_replayed_step_makes_few_calls():
    torch.manual_seed(0)
    calls, method = [], algorithms.fedavg(lr=0.05, batch_size=4, steps=20)
    for recorder in (None, graphs()):
        model = models.build("resnet18", classes=5, shape=(3, 32, 32))
        worker = Worker(
            make_program(model), fp.Task(model), torch.device("cuda:0"), stay=True, recorder=recorder
        )
        state = {name: tensor.cuda() for name, tensor in worker.program.initial.items()}
        x, held = (
            {name: state[name] for name in worker.program.shared},
            images(shape=(3, 32, 32)).part(slice(40)),
        )
        for who in range(2):
            with Counts() as counts:
                worker.train(state, held, method, x, {}, {}, seed=0, round=1, who=who)
        calls.append(counts.calls)
    assert calls[1] < calls[0] / 5, calls


def test_simulate_captures_by_default():
    held = images()
    federation = fp.FederatedData(held, [range(20), range(20, 44)])
    run = fp.simulate(
        fp.Task(network(), test=held),
        federation,
        algorithms.fedavg(lr=0.05, batch_size=4),
        rounds=2,
        cohort=2,
        engine="sequential",
        device="cuda",
    )
    assert run.engine == "sequential: one client after another on cuda:0, float32, captured"
