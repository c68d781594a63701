"""The device of a run, float64 in every engine, and the sequential engine on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.apps.flower.node import node_device
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError
from fedpara.tasks.metrics import METRICS, Totals, summed

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
METHODS = {
    "sgd": lambda: algorithms.fedavg(lr=0.05, batch_size=4),
    "momentum": lambda: algorithms.fedavg(lr=0.05, batch_size=4, momentum=0.9, weight_decay=0.01),
    "adamw": lambda: algorithms.fedavg(lr=0.01, batch_size=4, optimizer="adamw"),
    "kept": lambda: algorithms.fedavg(lr=0.01, batch_size=4, optimizer="adam", keep_optimizer=True),
    "scaffold": lambda: algorithms.scaffold(lr=0.05, batch_size=4),
    "clip": lambda: algorithms.fedprox(lr=0.05, batch_size=4, clip=0.5, mu=0.1),
}


def federation(digits, dtype=torch.float32):
    images = digits[0].part(slice(60))
    train = data.Examples(images.normalised().to(dtype), images.targets, 10)
    sizes = (12, 7, 16, 10)
    starts = [sum(sizes[:i]) for i in range(4)]
    return fp.FederatedData(train, [list(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)])


def played(task, held, method, engine, **options):
    return fp.simulate(task, held, method, rounds=2, cohort=4, engine=engine, **options)


def network(norm=True):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 10)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("wrong", ["cuda", "cuda:7", "gpu", "mps"])
def test_a_device_that_is_not_there_is_named_with_those_that_are(wrong, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device is '{wrong}': expected one of cpu. torch finds no GPU"):
        Settings(rounds=1, cohort=1, device=wrong)


def test_every_gpu_has_a_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:0", "cuda:1", None):
        Settings(rounds=1, cohort=1, device=device)
    Settings(rounds=1, cohort=1, engine="sequential", precision="tf32", device="cuda:1")
    with pytest.raises(ConfigError, match="expected one of cpu, cuda, cuda:0, cuda:1"):
        Settings(rounds=1, cohort=1, device="cuda:2")
    with pytest.raises(ConfigError, match="needs the batched or the sequential engine on a GPU"):
        Settings(rounds=1, cohort=1, precision="bfloat16", device="cpu")


def test_a_nodes_config_comes_before_the_environment_and_the_experiment(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("FEDPARA_DEVICE", "cuda:3")
    with pytest.raises(ConfigError, match="device is 'cuda:3'"):
        node_device({}, "cpu")
    assert node_device({"device": "cpu"}, "cuda") == torch.device("cpu")
    monkeypatch.delenv("FEDPARA_DEVICE")
    assert node_device({}, None) == torch.device("cpu")


def test_the_engine_says_where_it_trains(digits):
    run = played(fp.Task(network()), federation(digits), METHODS["sgd"](), "sequential", device="cpu")
    assert run.engine == "sequential: one client after another on the CPU"


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_float64_is_computed_in_float64(digits, method, norm):
    model, held = network(norm).double(), federation(digits, torch.float64)
    # Before BatchNorm some gradients are 0 but for rounding, which Adam divides by sqrt(v) + eps.
    near = 1e-7 if norm and METHODS[method]().local.optimizer != "sgd" else 1e-12
    runs = [
        played(fp.Task(model, test=held.train), held, METHODS[method](), engine, device="cpu")
        for engine in ("sequential", "batched")
    ]
    assert runs[1].engine.startswith("batched"), runs[1].engine
    states = [run.progress.x | run.progress.buffers for run in runs]
    for name, value in states[0].items():
        assert value.dtype == states[1][name].dtype
        assert torch.allclose(value, states[1][name], rtol=near, atol=near), name
    for a, b in zip(*(run.rounds for run in runs), strict=True):
        assert a.scores == pytest.approx(b.scores, rel=near)
        assert a.train_loss == pytest.approx(b.train_loss, rel=near)


def test_a_score_is_the_same_for_any_batch_size():
    torch.manual_seed(0)
    output, target = torch.randn(50, 4), torch.randint(0, 4, (50,))
    totals = [Totals(METRICS["accuracy"]) for _ in range(2)]
    for total, size in zip(totals, (50, 7), strict=True):
        for start in range(0, 50, size):
            part = slice(start, start + size)
            total.add(*summed(METRICS["accuracy"].of(output[part], target[part])))
    assert totals[0].score() == totals[1].score() == (output.argmax(1) == target).double().mean().item()


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("personal", [False, True])
    def test_the_sequential_engine_gives_the_rounds_of_the_cpu(self, digits, method, personal):
        held = federation(digits, torch.float64)
        if personal:
            held = replace(held, test_clients=[[0, 1, 2], [3, 4], [5, 6], [7, 8]])
        task = fp.Task(network().double(), test=held.train)
        runs = [
            played(task, held, METHODS[method](), "sequential", device=device) for device in ("cpu", "cuda")
        ]
        assert runs[1].engine == "sequential: one client after another on cuda:0, float32, captured"
        assert runs[0].bytes == runs[1].bytes
        states = [run.progress.x | run.progress.buffers for run in runs]
        for name, value in states[0].items():
            assert torch.allclose(value, states[1][name].cpu(), rtol=1e-8, atol=1e-8), name

    @pytest.mark.parametrize("engine", ["sequential", "batched"])
    def test_float64_stays_float64_at_any_precision(self, digits, engine):
        held = federation(digits, torch.float64)
        task = fp.Task(network().double())
        on_cpu = played(task, held, METHODS["sgd"](), "sequential", device="cpu").progress.x
        here = played(task, held, METHODS["sgd"](), engine, device="cuda", precision="bfloat16").progress.x
        for name, value in on_cpu.items():
            assert torch.allclose(value, here[name].cpu(), rtol=1e-9, atol=1e-9), name

    def test_bfloat16_rounds_the_steps_and_keeps_the_types(self, digits):
        held, task = federation(digits), fp.Task(models.mlp(64, 24, 10))
        runs = [
            played(task, held, METHODS["sgd"](), "sequential", device="cuda", precision=precision)
            for precision in ("float32", "bfloat16")
        ]
        for name, value in runs[0].progress.x.items():
            other = runs[1].progress.x[name]
            assert other.dtype == value.dtype == torch.float32
            assert torch.allclose(value, other, atol=0.05), name
        assert any(not torch.equal(t, runs[1].progress.x[n]) for n, t in runs[0].progress.x.items())

    def test_uneven_batch_norm_is_compiled_and_near_the_sequential_engine(self, digits):
        held, task = federation(digits), fp.Task(network())
        runs = [
            played(task, held, METHODS["sgd"](), engine, device="cuda", precision="float32")
            for engine in ("sequential", "batched")
        ]
        assert runs[1].engine.startswith("batched")
        assert "not compiled" not in runs[1].engine
        for name, value in (runs[0].progress.x | runs[0].progress.buffers).items():
            other = (runs[1].progress.x | runs[1].progress.buffers)[name]
            assert torch.allclose(value.cpu().double(), other.cpu().double(), atol=1e-2), name
