"""On a GPU, the batched engine gives the rounds of the sequential engine on a CPU."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.algorithms import Local
from fedpara.engines import transfer as freight
from fedpara.engines.batched.engine import Batched
from fedpara.engines.local.engine import Sequential
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import Session
from fedpara.errors import UpdateRejected
from fedpara.wire import Header, admit, make_message, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SCHEMES = {
    "original": None,
    "lowrank": fp.LowRank(gamma=0.3),
    "fedpara": fp.FedPara(gamma=0.3, nonlinearity="tanh"),
    "pfedpara": fp.PFedPara(gamma=0.3),
}


def both(name, model, method, rounds=3, even=False, link=None, **options):
    """The last round of each: sequential on the CPU, batched on the GPU."""
    train, test = data.load(f"generated:{name}")
    split = data.iid(train.targets, 8, 0) if even else data.dirichlet(train.targets, 8, alpha=0.5, seed=0)
    federation = fp.FederatedData(train, split)
    task = fp.Task(model, test=test, augment="none" if name == "shakespeare" else "crop-flip")
    session = Session(make_program(model), method, link or fp.Link(), 0)
    schedule = Schedule(rounds, 8, 4, federation.size)
    engines = (
        Sequential(session, task, federation, InMemory()),
        Batched(
            session,
            task,
            federation,
            InMemory(),
            cohorts=Cohorts(0, len(federation), 4),
            device="cuda",
            **options,
        ),
    )
    played = [list(run_rounds(session, engine, schedule, personal=False))[-1].progress for engine in engines]
    assert "not compiled" not in engines[1].why, engines[1].why
    return played


def assert_near(a, b, tolerance):
    assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
    for name, tensor in a.x.items():
        assert torch.allclose(tensor, b.x[name], rtol=tolerance, atol=tolerance), name


def written(model, scheme):
    torch.manual_seed(0)
    network = model()
    return network if scheme is None else fp.factorize(network, scheme, init="calibrated", force=True)


@pytest.mark.parametrize("algorithm", algorithms.names())
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_algorithm_and_scheme(algorithm, scheme):
    momentum = 0.0 if algorithm == "scaffold" else 0.5
    method = algorithms.build(algorithm, Local(lr=0.02, epochs=2, batch_size=8, momentum=momentum, clip=1.0))
    model = written(lambda: models.mlp(784, 24, 10), SCHEMES[scheme])
    assert_near(*both("mnist", model, method, precision="float32", compile=False), 1e-5)


@pytest.mark.parametrize("name", ["cnn", "vgg16-tiny", "resnet18-gn", "resnet18", "lstm"])
def test_every_kind_of_model(name):
    """Small learning rates: a deep network on batches of five amplifies rounding errors."""
    method = algorithms.fedavg(lr=1e-3, batch_size=5, steps=2)
    held, shape = ("shakespeare", (80,)) if name == "lstm" else ("cifar10", (3, 32, 32))
    model = models.build(name, classes=80 if name == "lstm" else 10, shape=shape)
    assert_near(*both(held, model, method, rounds=2, even=True, precision="float32", compile=False), 1e-4)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 2e-3), ("bfloat16", 2e-2)])
def test_compiled_in_each_precision(name, precision, tolerance):
    """`cnn` has the layers that the engine replaces: convolutions, the first one thin, and GroupNorm."""
    method = algorithms.fedavg(lr=0.02, batch_size=8)
    shape = (1, 28, 28) if name == "mlp" else (3, 32, 32)
    model = written(lambda: models.build(name, classes=10, shape=shape), SCHEMES["fedpara"])
    held = "mnist" if name == "mlp" else "cifar10"
    assert_near(*both(held, model, method, rounds=1, precision=precision), tolerance)


@pytest.mark.parametrize("method", [algorithms.fedavg, algorithms.fedadam])
def test_updates_stay_on_the_gpu(method, monkeypatch):
    """If clients have no memory, only the server's model is copied to the host."""

    moved, to_host = [], freight._to_host
    monkeypatch.setattr(freight, "_to_host", lambda whole: moved.append(whole.shape) or to_host(whole))
    model = models.build("resnet18", classes=10, shape=(3, 32, 32))  # its buffers are averaged too
    options = {"even": True, "rounds": 2, "compile": False, "precision": "float32"}
    after = both("cifar10", model, method(lr=1e-3, batch_size=5, steps=2), **options)
    assert_near(*after, 1e-4)
    for name, tensor in after[0].buffers.items():
        assert torch.allclose(tensor, after[1].buffers[name], rtol=1e-4, atol=1e-4), name
    assert all(tensor.is_cpu for tensor in (after[1].x | after[1].buffers).values())
    # In each round x, the buffers of two types, and at most two variables of the server, which are as large as x.
    assert len(moved) <= 2 * 5
    assert all(len(shape) == 1 for shape in moved)


@pytest.mark.parametrize("algorithm", [algorithms.fedavg, algorithms.scaffold])
def test_states_too_large_for_the_gpu_move_to_the_host_when_clients_end(algorithm, monkeypatch):
    monkeypatch.setattr("fedpara.engines.batched.budget.memory_of", lambda device: 1e5)
    model = models.build("cnn", classes=10, shape=(3, 32, 32))
    method = algorithm(lr=0.02, batch_size=8, steps=2)
    assert_near(*both("cifar10", model, method, compile=False, precision="float32"), 1e-4)


def test_an_unmarked_custom_algorithm_gets_tensors_on_the_host():
    method = algorithms.fedavg(lr=0.02, batch_size=8, steps=2)
    seen = []

    def own(x, server, updates, clients):
        seen.append({t.device.type for state in (x, *(u.y for u in updates)) for t in state.values()})
        return method.aggregate(x, server, updates, clients)

    model = models.build("cnn", classes=10, shape=(3, 32, 32))
    for mark, kinds in ((lambda f: f, {"cpu"}), (algorithms.on_any_device, {"cuda"})):
        changed = replace(method, aggregate=mark(own))
        assert_near(*both("cifar10", model, changed, rounds=1, compile=False, precision="float32"), 1e-5)
        assert seen[-1] == kinds


def test_a_message_on_the_gpu_has_the_same_bytes():
    state = {"w": torch.randn(3, 5), "steps": torch.tensor(7), "b": torch.randn(5)}
    there = {name: tensor.cuda() for name, tensor in state.items()}
    header = Header(1, "fedavg", "original", "client:3", 20)
    ours, theirs = make_message(there, header), make_message(state, header)
    assert bytes(ours) == bytes(theirs)
    assert len(ours) == len(bytes(ours))
    checks = {"spec": spec_of(state), "round": 1, "method": "fedavg", "scheme": "original", "link": "float32"}
    _, read = admit(ours, **checks, max_norm=1e-6, reference=state)
    assert all(read[name].is_cuda and torch.equal(read[name].cpu(), state[name]) for name in state)
    with pytest.raises(UpdateRejected, match="NaN"):
        admit(make_message({**there, "b": there["b"] / 0 * 0}, header), **checks)


@pytest.mark.parametrize(
    "link",
    [
        "float16",
        "bfloat16",
        "int8",
        "int4",
        "int2",
        "ternary",
        "topk(0.05)",
        "stc(0.05)",
        "sign",
        "eden(bits=2)",
    ],
)
def test_a_lossy_message_is_the_same_on_the_gpu(link):
    """Equal bytes where an encoder adds nothing up; otherwise the same layout, and values within rounding."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 40), (300,), (7,), (33, 20), (5000,)]
    state = {f"w{i}": torch.randn(shape, generator=generator) * 10.0**-i for i, shape in enumerate(shapes)}
    there = {name: tensor.cuda() for name, tensor in state.items()}
    header, spec = Header(1, "fedavg", "original", "client:3", 20), spec_of(state, link)
    ours, theirs = (
        make_message(one, header, link, torch.Generator().manual_seed(1)) for one in (there, state)
    )
    assert all(tensor.is_cuda for tensor in ours.tensors.values())
    assert len(ours) == len(theirs) == len(bytes(ours))
    if not link.startswith(("sign", "eden")):
        assert bytes(ours) == bytes(theirs)
    checks = {"spec": spec, "round": 1, "method": "fedavg", "scheme": "original", "link": link}
    _, read = admit(ours, **checks)
    _, expected = admit(theirs, **checks)
    for name, tensor in read.items():
        assert tensor.is_cuda
        off = float((tensor.cpu() - expected[name]).norm() / state[name].norm())
        assert off <= (0.05 if link.startswith("eden") else 1e-2), name
    with pytest.raises(UpdateRejected, match="'w1'"):
        make_message({**there, "w1": there["w1"] / 0 * 0}, header, link, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("link", ["int8", "int4", "eden", "topk(0.1, feedback=True)", "int8(feedback=True)"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "feddyn", "fednova", "ditto"])
def test_every_link_stays_on_the_gpu(algorithm, link):
    """Rounding at random may fall to either side, so values are close and numbers of bytes equal."""
    method = algorithms.build(algorithm, Local(lr=0.02, batch_size=8, steps=2))
    model = written(lambda: models.mlp(784, 24, 10), SCHEMES["pfedpara"])
    options = {"rounds": 2, "precision": "float32", "compile": False, "link": fp.Link(up=link, down=link)}
    assert_near(*both("mnist", model, method, **options), 2e-2)


def test_a_lossy_round_has_the_same_bits_twice():
    method = algorithms.scaffold(lr=0.02, batch_size=8, steps=2)
    model = written(lambda: models.mlp(784, 24, 10), SCHEMES["fedpara"])
    link = fp.Link(up="int8(feedback=True)", down="int4")
    options = {"rounds": 3, "precision": "float32", "compile": False, "link": link}
    first, second = (both("mnist", model, method, **options)[1] for _ in range(2))
    assert all(torch.equal(tensor, second.x[name]) for name, tensor in first.x.items())


def test_the_same_seed_gives_the_same_bits():
    """In bfloat16 no layer of this network uses cuDNN, which chooses its algorithms by timing them."""
    network = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(32, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(32, 64), nn.ReLU(), nn.MaxPool2d(16)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)),
    )
    method = algorithms.fedavg(lr=0.05, batch_size=8)
    first, second = (both("cifar10", network, method, rounds=2)[1] for _ in range(2))
    assert all(torch.equal(tensor, second.x[name]) for name, tensor in first.x.items())


START = """
import torch
import fedpara as fp
from fedpara import algorithms, data, models

train, test = data.load("generated:cifar10")
federation = fp.FederatedData(train, data.iid(train.targets, 4, 0))
model = fp.factorize(models.build("cnn", classes=10, shape=(3, 32, 32)), fp.FedPara(gamma=0.3))
method = algorithms.fedavg(lr=0.02, batch_size=8, steps=2)
run = fp.simulate(fp.Task(model, test=test), federation, method, rounds=1, cohort=4, engine="batched")
print(run.engine)
"""


def test_a_second_start_compiles_nothing(tmp_path):
    """Neither torch's kernels nor ours: the second start finds everything in the cache."""

    def start():
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        environment.pop("TRITON_CACHE_DIR", None)
        command = [sys.executable, "-c", START]
        said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        assert "not compiled" not in said, said
        return {path for path in tmp_path.rglob("*") if path.is_file()}

    left = start()
    assert any("_convolve" in path.name for path in left)
    assert start() == left
