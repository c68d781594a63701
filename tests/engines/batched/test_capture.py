"""The traced and compiled step on a CPU: its numbers, and its cache. `test_gpu.py` tests CUDA graphs."""

import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.algorithms import Local
from fedpara.engines.batched import capture
from fedpara.engines.batched.engine import Batched
from fedpara.engines.batched.kernels.conv import use_lane_convs
from fedpara.engines.batched.kernels.lstm import use_lane_lstm
from fedpara.engines.batched.kernels.norm import use_lane_norms
from fedpara.engines.batched.kernels.pool import use_mean_pooling
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import Session
from fedpara.parameterization.compose import stacked_parts as kernels_on_gpu
from fedpara.parameterization.schemes import write


class Traced(Batched):
    """An engine that runs its traced step without compiling it."""

    def _ready(self, tick, lane_state):
        program, tensors = capture.traced(tick, lane_state), lane_state.tensors()
        return lambda: program(*tensors, *lane_state.feed.next().tensors())


class Compiled(Batched):
    def _ready(self, tick, lane_state):
        return capture.compiled(tick, lane_state)


def last_round(kind, method, model, digits, rounds=2):
    train, test = digits
    federation = fp.FederatedData(train, data.dirichlet(train.targets, 8, alpha=0.5, seed=0))
    session = Session(make_program(model), method, fp.Link(), 0)
    engine = kind(session, fp.Task(model, test=test), federation, InMemory(), cohorts=Cohorts(0, 8, 4))
    return list(run_rounds(session, engine, Schedule(rounds, 8, 4, federation.size), personal=False))[
        -1
    ].progress


def small(scheme, network=lambda: models.mlp(64, 24, 10)):
    torch.manual_seed(0)
    return network() if scheme is None else fp.factorize(network(), scheme, init="calibrated", force=True)


def assert_same_rounds(a, b):
    assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
    for old, new in ((a.x, b.x), (a.buffers, b.buffers)):
        assert all(torch.allclose(tensor, new[name], rtol=1e-5, atol=1e-6) for name, tensor in old.items())


TANH = fp.FedPara(gamma=0.3, nonlinearity="tanh")


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [
        *((TANH, name) for name in algorithms.names()),
        *((scheme, name) for scheme in (None, fp.PFedPara(gamma=0.3)) for name in ("fedavg", "scaffold")),
    ],
)
def test_traced_rounds_equal_eager_rounds(algorithm, scheme, digits):
    momentum = 0.0 if algorithm == "scaffold" else 0.5
    method = algorithms.build(algorithm, Local(lr=0.05, batch_size=32, momentum=momentum, clip=1.0))
    model = small(scheme)
    assert_same_rounds(*(last_round(kind, method, model, digits) for kind in (Batched, Traced)))


def test_the_jacobian_correction_is_traced_too(digits):
    method = algorithms.fedavg(lr=0.05, batch_size=32, jacobian=1.0)
    model = small(fp.FedPara(gamma=0.3))
    assert_same_rounds(*(last_round(kind, method, model, digits) for kind in (Batched, Traced)))


def normalized():
    """Running statistics, dropout, and a non-persistent buffer."""
    network = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.2),
        Shift(16),
    )
    return network.append(torch.nn.Linear(16, 10))


class Shift(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.by = torch.linspace(-1, 1, width)

    def forward(self, x):
        return x + self.by


def test_buffers_and_dropout_are_traced_too(digits):
    method = algorithms.fedavg(lr=0.05, batch_size=32)
    model = small(None, normalized)
    a, b = (last_round(kind, method, model, digits) for kind in (Batched, Traced))
    assert_same_rounds(a, b)
    assert not torch.equal(b.buffers["2.running_mean"], torch.zeros(16))


def as_on_a_gpu(kind):
    class There(kind):
        """With the layers that a GPU uses, which also run on a CPU."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            for own in (use_mean_pooling, use_lane_lstm, use_lane_convs, use_lane_norms):
                own(self.plain)

    return There


@pytest.mark.parametrize(("name", "held"), [("cnn", "cifar10"), ("lstm-tiny", "shakespeare")])
def test_traced_lane_layers_give_the_same_bits(name, held):
    examples = data.load(f"generated:{held}")
    method = algorithms.fedavg(lr=0.01, batch_size=5, steps=2)
    shape, classes = examples[0].inputs.shape[1:], examples[0].classes
    model = small(fp.FedPara(gamma=0.3), lambda: models.build(name, classes=classes, shape=shape))
    a, b = (last_round(as_on_a_gpu(kind), method, model, examples, 1) for kind in (Batched, Traced))
    assert all(torch.equal(tensor, b.x[key]) for key, tensor in a.x.items())


@pytest.mark.parametrize("scheme", [fp.LowRank(gamma=0.1), fp.FedPara(gamma=0.1)])
def test_the_compiler_can_read_a_gradient_of_kernels_composed_as_on_a_gpu(scheme):
    """Its decompositions give some tensors other strides than the traced step has."""
    model = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    plain = use_lane_convs(torch.nn.Sequential(model))
    form = write(scheme, model.weight.shape)
    torch.manual_seed(0)
    factors = [torch.randn(4, *shape) for shape in form.factors.values()]
    x = torch.randn(4, 2, 3, 8, 8)

    def loss(images, *factors):
        halves = len(scheme.suffixes)
        parts = [factors[i : i + 3] for i in range(0, 3 * halves, 3)]
        kernel = scheme.join(kernels_on_gpu(parts))
        return torch.func.functional_call(plain, {"0.weight": kernel}, (images,)).square().mean()

    gradients = torch.func.vmap(torch.func.grad(loss, tuple(range(1, 1 + len(factors)))))
    program = make_fx(gradients)(x, *factors)
    decomposed = make_fx(program, decomposition_table=select_decomp_table())(x, *factors)
    for expected, found in zip(gradients(x, *factors), decomposed(x, *factors), strict=True):
        assert torch.allclose(expected, found, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs another, for C++")
def test_a_compiled_step_is_loaded_from_the_cache(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = small(  # one layer: every kernel is compiled twice
        fp.FedPara(gamma=0.3), lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    )

    def found(epochs):
        method = algorithms.scaffold(lr=0.05, batch_size=32, epochs=epochs)
        before = Counter(counters["aot_autograd"])
        with inductor.patch({"cpp.simdlen": 1}):  # a third less C++ to compile
            done = last_round(Compiled, method, model, digits)
        assert_same_rounds(done, last_round(Batched, method, model, digits))
        return Counter(counters["aot_autograd"]) - before

    first, second = found(epochs=1), found(epochs=2)  # another number of steps, the same program
    monkeypatch.setattr(capture, "CUSTOM_OPS", (*capture.CUSTOM_OPS, "gpu/conv.py"))
    third = found(epochs=1)
    assert [each["autograd_cache_miss"] for each in (first, second, third)] == [1, 0, 1]
    assert [each["autograd_cache_hit"] for each in (first, second, third)] == [0, 1, 0]


class Recorded:
    """Takes the place of CUDA graphs: runs what it should record."""

    def __init__(self, device):
        pass

    def warm_up(self, step):
        step()

    def record(self, step):
        return step


def test_a_step_that_is_not_compiled_says_so_once(digits, monkeypatch, caplog):
    def broken(tick, lanes):
        raise ValueError("no such view")

    class Captured(Batched):
        def _ready(self, tick, lane_state):
            return capture.capture(tick, lane_state, True, self._note)

    monkeypatch.setattr(capture, "CudaGraphs", Recorded)
    monkeypatch.setattr(capture, "compiled", broken)
    monkeypatch.setattr(capture, "use_lasting_caches", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    method, model = algorithms.fedavg(lr=0.05, batch_size=32), small(fp.FedPara(gamma=0.3))
    with caplog.at_level("INFO", "fedpara"):
        made = last_round(Captured, method, model, digits)
    said = [line for line in caplog.messages if "not compiled" in line]
    assert said == ["engine: the step is not compiled, and slower: ValueError: no such view"]
    assert_same_rounds(last_round(Batched, method, model, digits), made)


FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def test_every_start_uses_the_same_compile_cache(tmp_path):
    """In a fresh process, because torch sets a folder when it is imported. Then with the user's folders."""
    code = f"""
import os, torch._dynamo
from fedpara.engines.batched.capture import use_lasting_caches
for chosen in ({{}}, {{name: name for name in {FOLDERS}}}):
    os.environ.update(chosen)
    use_lasting_caches()
    print(*(os.environ[name] for name in {FOLDERS}), sep="\\n")
"""
    environment = {name: value for name, value in os.environ.items() if name not in FOLDERS}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    ours = tmp_path / "fedpara" / "compiled"
    assert ran.stdout.splitlines() == [str(ours), str(ours / "triton"), *FOLDERS]
