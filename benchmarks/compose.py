"""What composing costs: VGG16's 13 kernels (gamma 0.1) alone, and within a training step of stacked clients.

    python benchmarks/compose.py                  the kernels: fedpara, Prop. 3 by einsum, PEFT's LoHa
    python benchmarks/compose.py --device cuda    the kernels, then whole steps, original against FedPara
    python benchmarks/compose.py --smoke          both on the CPU, small and not compiled: only that they run

The rows of a table are measured in one process, in turns, so that a slow moment falls on all of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

import fedpara as fp
from fedpara import models
from fedpara.parameterization import Form, compose_state, fan_out, forms
from fedpara.state import State

GAMMA = 0.1
LR = 1e-3
PAPER = 2.34 / 1.64 - 1
"""What FedPara adds to the computation of a round in the paper's table of times (appendix D.1)."""

Step = Callable[[], object]


def einsum(factors: Sequence[Tensor]) -> Tensor:
    """Prop. 3 as it is written."""
    x1, y1, t1, x2, y2, t2 = factors
    w1 = torch.einsum("abkl,oa,ib->oikl", t1, x1, y1)
    return w1 * torch.einsum("abkl,oa,ib->oikl", t2, x2, y2)


def peft(factors: Sequence[Tensor]) -> Tensor:
    """PEFT's LoHa: X and Y are kept transposed, the backward is written by hand."""
    from peft.tuners.loha.layer import HadaWeightCP

    x1, y1, t1, x2, y2, t2 = factors
    weight: Tensor = HadaWeightCP.apply(t1, x1, y1, t2, x2, y2, torch.ones((), device=t1.device))
    return weight


def kernel_table(written: Sequence[Form], device: torch.device, repeats: int) -> None:
    """Milliseconds for all kernels of one model, float32: composed, then backpropagated to every factor.

    The einsum leaves a kernel in an order of its own, which the convolution copies. So in the last column each kernel
    is composed, its convolution takes one 2 x 2 image, and all goes back to the factors.
    """
    start = [[factor.to(device) for factor in fan_out(form)] for form in written]
    last = [replace(form, channels_last=True) for form in written]
    ways = {
        "fedpara": [(form.compose, _leaves(f)) for form, f in zip(written, start, strict=True)],
        "- channels-last": [(form.compose, _leaves(f)) for form, f in zip(last, start, strict=True)],
        "einsum of Prop. 3": [(einsum, _leaves(f)) for f in start],
    }
    if importlib.util.find_spec("peft"):
        transposed = [[t.mT.contiguous() if t.dim() == 2 else t for t in f] for f in start]
        ways["PEFT's LoHa"] = [(peft, _leaves(f)) for f in transposed]
    else:
        print("PEFT's LoHa is left out: the package peft is not installed here.")
    gradients = [torch.randn(form.shape, device=device) for form in written]
    composed: dict[str, list[Tensor]] = {}
    upstream: dict[str, list[Tensor]] = {}

    def forward(name: str) -> None:
        composed[name] = [compose(factors) for compose, factors in ways[name]]

    def backward(name: str) -> None:
        leaves = [factor for _, factors in ways[name] for factor in factors]
        torch.autograd.grad(composed.pop(name), leaves, upstream[name])

    images = [torch.randn(1, form.shape[1], 2, 2, device=device) for form in written]

    def used(name: str) -> None:
        for (compose, factors), image in zip(ways[name], images, strict=True):
            torch.autograd.grad(F.conv2d(image, compose(factors), padding=1).sum(), factors)

    for name in ways:
        forward(name)
        for w, factors in zip(composed[name], start, strict=True):
            torch.testing.assert_close(w, einsum(factors), rtol=1e-3, atol=1e-3)
        upstream[name] = [
            torch.empty_like(w).copy_(g) for w, g in zip(composed[name], gradients, strict=True)
        ]

    parts = {n: (partial(forward, n), partial(backward, n), partial(used, n)) for n in ways}
    times = in_turns(parts, device, repeats)
    print(f"\nVGG16's {len(written)} kernels, gamma {GAMMA}, float32; ms, median (least) of {repeats}")
    print(f"{'':20}{'compose':>18}{'backward':>18}{'both':>18}{'against':>9}{'in use':>18}{'against':>9}")
    cells = {
        n: [[t[0] for t in ts], [t[1] for t in ts], [t[0] + t[1] for t in ts]] for n, ts in times.items()
    }
    in_use = {n: [t[2] for t in ts] for n, ts in times.items()}
    for name, row in cells.items():
        both = median(row[2]) / median(cells["fedpara"][2])
        use = median(in_use[name]) / median(in_use["fedpara"])
        columns = "".join(f"{_ms(cell):>18}" for cell in row)
        print(f"{name:20}{columns}{both:>8.2f}x{_ms(in_use[name]):>18}{use:>8.2f}x")


def step_table(
    device: torch.device, clients: int, batch: int, dropout: float, compiled: bool, repeats: int
) -> None:
    """Milliseconds for one SGD step of all clients at once: vmap(grad), bfloat16 autocast, one CUDA graph."""
    torch.manual_seed(0)
    plain = models.vgg16(dropout=dropout).to(device)
    factorized = fp.factorize(models.vgg16().to(device), fp.FedPara(gamma=GAMMA), where=models.convolutions)
    last = device.type == "cuda"
    written = {name: replace(form, channels_last=last) for name, form in forms(factorized).items()}
    x = torch.randn(clients, batch, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (clients, batch), device=device)

    def stacked(model: nn.Module) -> State:
        return {name: t.detach().repeat(clients, *[1] * t.dim()) for name, t in model.state_dict().items()}

    dense, whole = stacked(plain), stacked(factorized)
    moved = {name: _channels_last(t) if name in written else t for name, t in stacked(plain).items()}
    factors = {name: t.clone() for name, t in whole.items() if name.rpartition(".")[0] in written}
    kernels = vmap(partial(_compose, written))(factors)
    upstream = {name: torch.randn_like(w) for name, w in kernels.items()}
    given = {name: t.clone() for name, t in whole.items() if name not in factors} | kernels

    steps: dict[str, Step] = {"original": lambda: _train(plain, {}, dense, x, y)}
    if device.type == "cuda":
        steps["original, channels-last"] = lambda: _train(plain, {}, moved, x, y)
    steps["FedPara"] = lambda: _train(plain, written, whole, x, y)
    steps["- its kernels given"] = lambda: _train(plain, {}, given, x, y, held=list(kernels))
    steps["- composing alone"] = lambda: _there_and_back(written, factors, upstream)

    for name, step in steps.items():
        began = time.perf_counter()
        if compiled:
            step = torch.compile(step, dynamic=False, fullgraph=True)
        steps[name] = captured(step) if device.type == "cuda" else step
        steps[name]()
        print(f"ready after {time.perf_counter() - began:5.1f} s: {name}", flush=True)

    times = in_turns({name: (step,) for name, step in steps.items()}, device, repeats)
    seconds = {name: [turn[0] for turn in turns] for name, turns in times.items()}
    how = "bfloat16 autocast, CUDA graph" if device.type == "cuda" else "float32"
    print(
        f"\nVGG16, SGD step of {clients} stacked clients, batch {batch}, dropout {dropout}, gamma {GAMMA}, {how}, "
        f"{'compiled' if compiled else 'eager'}; ms, median (least) of {repeats}"
    )
    print(f"{'':28}{'all clients':>18}{'a client':>12}")
    for name, row in seconds.items():
        print(f"{name:28}{_ms(row):>18}{1e3 * median(row) / clients:>12.3f}")
    base = min((name for name in seconds if name.startswith("original")), key=lambda n: median(seconds[n]))
    fedpara, composing = median(seconds["FedPara"]), median(seconds["- composing alone"])
    print(
        f"FedPara's step against the faster original ({base}): {fedpara / median(seconds[base]) - 1:+.1%}, "
        f"the paper's round {PAPER:+.0%}. Composing alone is {composing / fedpara:.1%} of FedPara's step."
    )
    finite = all(bool(t.isfinite().all()) for state in (dense, whole) for t in state.values())
    assert finite, "the training diverged, so the times are those of NaNs: lower LR"


def _train(
    model: nn.Module,
    written: Mapping[str, Form],
    state: State,
    x: Tensor,
    y: Tensor,
    held: Sequence[str] = (),
) -> list[Tensor]:
    """state -= lr gradient, in place. The gradients of what is `held` are returned, and it stays as it is."""

    def loss(state: State, x: Tensor, y: Tensor) -> Tensor:
        with autocast(x.device):
            logits = functional_call(model, compose_state(state, written), (x,))
        return F.cross_entropy(logits.float(), y)

    gradient = vmap(grad(loss), randomness="different")(state, x, y)
    trained = [name for name in state if name not in held]
    torch._foreach_add_([state[n] for n in trained], [gradient[n] for n in trained], alpha=-LR)
    return [gradient[name] for name in held]


def _compose(written: Mapping[str, Form], factors: State) -> State:
    with autocast(next(iter(factors.values())).device):
        return compose_state(factors, written)


def _there_and_back(written: Mapping[str, Form], factors: State, upstream: State) -> State:
    """The kernels from their factors, a gradient of the kernels back to the factors, the factors' update."""

    def one_client(factors: State, upstream: State) -> tuple[State, State]:
        kernels, back, *_ = vjp(partial(_compose, written), factors)
        return kernels, back(upstream)[0]

    kernels, gradient = vmap(one_client)(factors, upstream)
    torch._foreach_add_(list(factors.values()), [gradient[n] for n in factors], alpha=-LR)
    result: State = kernels
    return result


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on the GPU; on a CPU without bfloat16 units it would take minutes a step."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def captured(step: Step) -> Step:
    """The step as one CUDA graph, warmed up on a side stream, where compiling and cuDNN's trials may allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Step = graph.replay
    return replay


def in_turns(
    rows: Mapping[str, Sequence[Step]], device: torch.device, repeats: int
) -> dict[str, list[list[float]]]:
    """Seconds of each part of each row, once a turn, the rows of a turn in random order.

    A row runs once unmeasured before it is measured, so that it finds memory and caches as it leaves them
    itself and not as the row before did.
    """
    order = random.Random(0)
    times: dict[str, list[list[float]]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name in order.sample(list(rows), len(rows)):
            for part in rows[name]:
                part()
            times[name].append([elapsed(part, device) for part in rows[name]])
    return times


def elapsed(step: Step, device: torch.device) -> float:
    """Seconds by CUDA events, or of CPU time, in which other programs on the machine do not count."""
    if device.type != "cuda":
        began = time.process_time()
        step()
        return time.process_time() - began
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    step()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def hardware(device: torch.device) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if importlib.util.find_spec("peft"):
        versions += f", peft {importlib.metadata.version('peft')}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}; {versions}"
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True).stdout if shutil.which("lscpu") else ""
    model = [line.partition(":")[2].strip() for line in lscpu.splitlines() if line.startswith("Model name")]
    threads = torch.get_num_threads()
    return f"{' '.join(model) or platform.machine()}, {os.cpu_count()} cores, {threads} used; {versions}"


def _leaves(factors: Sequence[Tensor]) -> list[Tensor]:
    return [factor.detach().clone().requires_grad_() for factor in factors]


def _channels_last(stacked: Tensor) -> Tensor:
    """[clients, O, I, k, k], each client's kernel in channels-last order."""
    return stacked.movedim(2, -1).contiguous().movedim(-1, 2)


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.2f} ({1e3 * min(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="default: not in a smoke run"
    )
    parser.add_argument("--smoke", action="store_true", help="2 clients, batch 2, 2 repeats; not for figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.smoke:
        args.clients = args.batch = args.repeats = 2
    compiled = not args.smoke if args.compile is None else args.compile
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    print(hardware(device))
    model = fp.factorize(models.vgg16(), fp.FedPara(gamma=GAMMA), where=models.convolutions)
    kernel_table(list(forms(model).values()), device, args.repeats)
    if args.smoke or device.type == "cuda":
        step_table(device, args.clients, args.batch, args.dropout, compiled, args.repeats)


if __name__ == "__main__":
    main()
