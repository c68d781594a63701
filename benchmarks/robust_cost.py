"""Seconds of a defence for one round of VGG16 (FedPara, gamma 0.1), and how near its refit comes.

    python benchmarks/robust_cost.py --device cuda                 # random updates of 50 clients
    python benchmarks/robust_cost.py --device cuda --steps 20      # updates of local steps on random images

A defence composes the updates, weighs or combines them, and refits the factors. "refit" is the last part alone, with
the number of kernels that it launches and of values that the host waits for. "left" is ||W - compose(refitted)|| as a
share of ||W - compose(x)||, the mean and the largest over the 13 kernels.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedpara as fp
from fedpara import models
from fedpara.algorithms import FromMean, Mean, Update, Variables
from fedpara.engines.program import make_program
from fedpara.parameterization.composed import exact_products
from fedpara.robust import DEFENCES, Blocks, robust_mean
from fedpara.state import State

NAMES = ("mean", "median", "multi-krum", "rfa", "auto")
NO_KERNEL = {
    *("view", "_unsafe_view", "expand", "permute", "transpose", "unsqueeze", "squeeze", "select", "slice", "detach"),
    *("alias", "t", "as_strided", "unbind", "split", "split_with_sizes", "empty", "new_empty", "empty_like"),
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts operations that launch a kernel, and those that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = self.waited = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.launched += name not in NO_KERNEL
        self.waited += name == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


class Recording(Blocks):
    """Keeps the weights of the last refit."""

    def refit(self, x: State, weights: Mapping[str, Tensor]) -> State:
        self.__dict__["weights"] = dict(weights)
        return super().refit(x, weights)


def step(x: State, server: Variables, mean: Mean, clients: int) -> tuple[State, Variables]:
    return mean.y, server


def noisy(x: State, clients: int) -> list[State]:
    return [
        {n: t + 0.01 * t.std(correction=0) * torch.randn_like(t) for n, t in x.items()}
        for _ in range(clients)
    ]


def trained(model: nn.Module, x: State, clients: int, steps: int) -> list[State]:
    """After SGD on random images, whose classes each client draws from five of ten."""
    names = dict(zip(x, (p for p in model.parameters() if p.requires_grad), strict=True))
    made = []
    for client in range(clients):
        for name, parameter in names.items():
            parameter.data.copy_(x[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            device = next(iter(x.values())).device
            images, classes = torch.randn(16, 3, 32, 32), (torch.randint(5, (16,)) + client) % 10
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to(device)), classes.to(device)).backward()
            optimizer.step()
        made.append({name: parameter.detach().clone() for name, parameter in names.items()})
    return made


def timed(work: Callable[[], Any], device: str, runs: int) -> float:
    """The median of the runs."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def left(blocks: Blocks, x: State, weights: State, refitted: State) -> list[float]:
    return [
        float((weights[b.name] - b.of(refitted)).norm() / (weights[b.name] - b.of(x)).norm())
        for b in blocks.over(x)
        if b.compose is not None
    ]


def main(device: str, clients: int, runs: int, steps: int, defences: list[str]) -> None:
    torch.manual_seed(0)
    network = models.build("vgg16", classes=10, shape=(3, 32, 32))
    model = fp.factorize(network, fp.FedPara(gamma=0.1), models.rule("vgg16")).to(device)
    program = make_program(model)
    blocks = Recording(program.forms)
    x = {name: program.initial[name].to(device) for name in program.shared}
    ys = trained(model, x, clients, steps) if steps else noisy(x, clients)
    updates = [Update(y, {}, 1) for y in ys]
    print(
        f"{torch.cuda.get_device_name(device) if device.startswith('cuda') else 'CPU'}; torch {torch.__version__}; "
        f"VGG16, FedPara, gamma 0.1; {clients} clients, {f'{steps} local steps' if steps else 'random updates'}\n\n"
        "| defence | seconds | refit | kernels | waits | left, mean | left, largest |\n|---|---|---|---|---|---|---|"
    )
    for name in defences:
        defence = DEFENCES[name]()

        def defend(defence: Any = defence) -> Any:
            return robust_mean(defence, blocks, x, updates, [{}] * clients, FromMean(step))

        defend()  # warms up
        whole = timed(defend, device, runs)
        weights = blocks.__dict__["weights"]
        with exact_products(), torch.no_grad():
            with Kernels() as kernels:
                refitted = blocks.refit(x, weights)
            alone = timed(partial(blocks.refit, x, weights), device, runs)
            shares = left(blocks, x, weights, refitted)
        print(
            f"| {name} | {whole:.3f} | {alone:.3f} | {kernels.launched} | {kernels.waited} | "
            f"{statistics.mean(shares):.4f} | {max(shares):.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=0, help="local steps on random images; 0: random updates"
    )
    parser.add_argument("--defences", nargs="+", default=NAMES)
    main(**vars(parser.parse_args()))
