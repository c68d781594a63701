"""What the Jacobian correction costs and how exact it is, against its definition differentiated twice.

    python benchmarks/jacobian.py            all tables, on the CPU; about 10 minutes
    python benchmarks/jacobian.py --smoke    smaller networks, one turn: only that it runs

`gpu.py --only 'fedpara.*compiled/bfloat16/16'` has the corrected step of stacked clients on a GPU.

The definition composes the stepped factors, subtracts, and lets autograd differentiate. The library did so before.
The rows of a table are measured in one process, in turns.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor import config, standalone_compile
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch.func import functional_call, grad, grad_and_value, vjp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import fedpara as fp
from fedpara import models
from fedpara.algorithms import Local
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import make_program
from fedpara.parameterization import Form, compose_state, corrected_backward, forms, write
from fedpara.state import State

GAMMA = 0.1
SCHEMES = {
    "FedPara": fp.FedPara(gamma=GAMMA),
    "FedPara, tanh": fp.FedPara(gamma=GAMMA, nonlinearity="tanh"),
    "FedPara, reshaped": fp.FedPara(gamma=GAMMA, conv="reshape"),
    "pFedPara": fp.PFedPara(gamma=GAMMA),
    "low-rank": fp.LowRank(gamma=GAMMA),
}
Backward = Callable[[State], tuple[State, Any]]


def by_definition(
    backward: Backward, state: State, written: Mapping[str, Form], eta: float, lambda_: float
) -> State:
    """The gradient of L + lambda / 2 * the sum of ||compose(F - eta J_F) - (W - eta J_W)||."""
    plain, pull = vjp(lambda s: compose_state(s, written), state)  # type: ignore[misc]
    j_plain, _ = backward(plain)
    gradient: State = pull(j_plain)[0]
    for weight, form in written.items():
        names, j_w = [f"{weight}.{factor}" for factor in form.factors], j_plain[weight]

        def penalty(*factors: Tensor, form: Form = form, j_w: Tensor = j_w) -> Tensor:
            w, pull = vjp(lambda *f: form.compose(f), *factors)  # type: ignore[misc]
            stepped = form.compose([f - eta * j for f, j in zip(factors, pull(j_w), strict=True)])
            return torch.linalg.vector_norm(stepped - (w - eta * j_w)) / 2  # type: ignore[no-any-return]

        factors = [state[name] for name in names]
        found = grad(penalty, argnums=tuple(range(len(factors))))(*factors)
        gradient |= {name: gradient[name] + lambda_ * g for name, g in zip(names, found, strict=True)}
    return gradient


def corrected(
    backward: Backward,
    state: State,
    written: Mapping[str, Form],
    eta: float,
    lambda_: float,
    narrow: bool = False,
) -> State:
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=narrow)
    options: dict[str, Any] = {"eta": eta, "lambda_": lambda_, "norm": "plain", "autocast": autocast}
    return corrected_backward(backward, state, written, **options)[0]


def exactness() -> None:
    """The error of the penalty's gradient for the same J_W, relative to the definition in float64."""
    print(
        "\nError of the correction relative to float64, for the same J_W; plain: of the gradient without it\n"
    )
    print("| | eta | definition, float32 | float32 | definition, bfloat16 | bfloat16 | plain, bfloat16 |")
    print("|---|---|---|---|---|---|---|")
    for name, scheme in SCHEMES.items():
        torch.manual_seed(0)
        layers = nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(1024, 10)
        model = fp.factorize(nn.Sequential(*layers), scheme)
        written, state = forms(model), {n: t.detach() for n, t in model.state_dict().items()}
        exact = {n: t.double() for n, t in state.items()}
        plain, x, y = fp.merge(model), torch.randn(16, 32, 8, 8).double(), torch.randint(0, 10, (16,))

        def loss(s: State, plain: nn.Module = plain, x: Tensor = x, y: Tensor = y) -> Tensor:
            return nn.functional.cross_entropy(functional_call(plain, s, (x,)), y)

        j, _ = grad_and_value(loss)(compose_state(exact, written))

        def backward(s: State, j: State = j) -> tuple[State, None]:
            return {n: j[n].to(t.dtype) for n, t in s.items()}, None

        for eta in (0.1, 1e-3):
            # A large lambda, so that the plain gradient is small beside the correction.
            definition = partial(by_definition, backward, written=written, eta=eta)
            ours = partial(corrected, backward, written=written, eta=eta)
            right, without = (definition(state=exact, lambda_=lambda_) for lambda_ in (1e6, 0.0))
            bare = {n: t - without[n] for n, t in right.items()}
            with torch.autocast("cpu", torch.bfloat16):
                rounded = definition(state=state, lambda_=1e6)
            found = definition(state=state, lambda_=1e6), ours(state=state, lambda_=1e6), rounded
            errors = [distance({n: t - without[n] for n, t in one.items()}, bare) for one in found]
            errors.append(
                distance(
                    {n: t - without[n] for n, t in ours(state=state, lambda_=1e6, narrow=True).items()}, bare
                )
            )
            errors.append(distance(ours(state=state, lambda_=0.0, narrow=True), without))
            print(f"| {name} | {eta} | {' | '.join(f'{error:.1e}' for error in errors)} |", flush=True)


def distance(a: State, b: State) -> float:
    joined = [torch.cat([s[n].double().reshape(-1) for n in b]) for s in (a, b)]
    return float((joined[0] - joined[1]).norm() / joined[1].norm())


class Flops(TorchDispatchMode):
    """Counts the operations of products and convolutions."""

    total = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if count := flop_registry.get(op._overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def step_table(smoke: bool) -> None:
    """Milliseconds of CPU time and operations of one gradient in the sequential engine, float32."""

    def mlp(*widths: int) -> nn.Module:
        linears = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        return fp.factorize(nn.Sequential(nn.Flatten(), *linears[:-1]), fp.FedPara(gamma=GAMMA))

    def convolutional(model: nn.Module) -> nn.Module:
        return fp.factorize(model, fp.FedPara(gamma=GAMMA), where=models.convolutions)

    torch.manual_seed(0)
    cases = {"MLP 64-256-256-10, batch 16": (mlp(64, 256, 256, 10), (16, 1, 8, 8), 40)}
    if not smoke:
        cases["MLP 784-1024-1024-10, batch 32"] = mlp(784, 1024, 1024, 10), (32, 1, 28, 28), 15
        resnet = convolutional(models.resnet18(10, norm="batch", shrink=4))
        cases["ResNet18 with BatchNorm, a quarter as wide, batch 16"] = resnet, (16, 3, 32, 32), 3
        cases["VGG16, batch 8"] = convolutional(models.vgg16(10)), (8, 3, 32, 32), 3
    print("\nOne gradient, float32, one thread: ms of CPU time (against plain), GFLOP (against plain)\n")
    print("| | plain | by the definition | corrected |\n|---|---|---|---|")
    for name, (model, shape, turns) in cases.items():
        x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
        steps = ways(Worker(make_program(model), fp.Task(model)), x, y)
        work: dict[str, float] = {}
        times: dict[str, list[float]] = {way: [] for way in steps}
        for way, step in steps.items():
            with Flops() as counted:
                step()
            work[way] = counted.total / 1e9
        for _ in range(1 if smoke else turns):
            for way, step in steps.items():
                began = time.process_time()
                step()
                times[way].append(1e3 * (time.process_time() - began))
        took = {way: median(found) for way, found in times.items()}
        cells = [
            f"{took[way]:.1f} ({took[way] / took['plain']:.2f}x), {work[way]:.2f} ({work[way] / work['plain']:.2f}x)"
            for way in steps
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def ways(worker: Worker, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    plain, written = worker.program.plain().train(), worker.program.forms

    def loss(state: State) -> Tensor:
        buffers = {name: tensor.clone() for name, tensor in worker.buffers.items()}
        return nn.functional.cross_entropy(functional_call(plain, {**state, **buffers}, (x,)), y)

    def definition() -> None:
        state = {name: tensor.detach() for name, tensor in worker.parameters.items()}
        by_definition(grad_and_value(loss), state, written, 0.01, 1.0)
        if worker.buffers:  # discarded above; a second forward pass computed them
            with torch.no_grad():
                worker.output(x)

    return {
        "plain": lambda: worker.gradient(x, y, Local(), 0.01),
        "definition": definition,
        "corrected": lambda: worker.gradient(x, y, Local(jacobian=1.0), 0.01),
    }


class Counted(Exception):
    """The bytes are known, and no code needs to be compiled."""


def traffic() -> None:
    """What torch's compiler makes of composing one kernel and going back: bytes and operations, without the network.

    Counted after fusion for a CPU, where the compiler fuses less than for a GPU.
    """
    contiguous = write(fp.FedPara(gamma=GAMMA), (256, 256, 3, 3))
    form = replace(contiguous, channels_last=True)
    state = {f"w.{factor}": torch.randn(sides) for factor, sides in form.factors.items()}
    j_w = torch.randn(form.shape).bfloat16()
    number = torch.Size(form.shape).numel()
    print(
        "\nOne kernel, 256 x 256 x 3 x 3, bfloat16: bytes in reads or writes of W, and products of rank r\n"
    )
    print("| | reads and writes | products |\n|---|---|---|")
    ways: dict[str, Callable[[Backward, State], State]] = {
        "plain": lambda b, s: corrected(b, s, {"w": form}, 0.1, 0.0, narrow=True),
        "by the definition, in float32": lambda b, s: by_definition(b, s, {"w": contiguous}, 0.1, 1.0),
        "corrected": lambda b, s: corrected(b, s, {"w": form}, 0.1, 1.0, narrow=True),
    }
    for name, way in ways.items():
        last = torch.contiguous_format if name.startswith("by") else torch.channels_last
        j_w = j_w.contiguous(memory_format=last)
        graph = make_fx(_composed_and_back(way), tracing_mode="fake", _allow_non_fake_inputs=True)(state, j_w)
        graph.graph.eliminate_dead_code()
        work = sum(
            2 * node.meta["val"].numel() * node.args[0].meta["val"].shape[-1]
            for node in graph.graph.nodes
            if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        )
        moved = bytes_of(graph, [*state.values(), j_w])
        print(f"| {name} | {moved / (2 * number):.1f} | {work / (2 * number * form.rank):.1f} |", flush=True)


def _composed_and_back(way: Callable[[Backward, State], State]) -> Callable[[State, Tensor], object]:
    """A function of the factors and J_W: the gradient, and W in bfloat16."""

    def whole(state: State, j_w: Tensor) -> tuple[State, Tensor]:
        used: list[Tensor] = []

        def backward(plain: State) -> tuple[State, None]:
            used.append(plain["w"].bfloat16())
            return {"w": j_w.to(plain["w"].dtype)}, None

        return way(backward, state), used[0]

    return whole


def bytes_of(graph: GraphModule, inputs: list[Any]) -> int:
    """Bytes that the compiled program reads and writes."""
    found: list[int] = []

    def count(self: GraphLowering) -> None:
        self._update_scheduler()
        found.append(self.count_bytes()[0])
        raise Counted

    with (
        patch.object(GraphLowering, "codegen", count),
        config.patch(force_disable_caches=True),
        suppress(InductorError),
    ):
        standalone_compile(graph, inputs, dynamic_shapes="from_example_inputs")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}; Python {platform.python_version()}, torch {torch.__version__}")
    traffic()
    exactness()
    step_table(args.smoke)


if __name__ == "__main__":
    main()
