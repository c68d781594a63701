"""Seconds of a defence for one round of VGG16 (FedPara, gamma 0.1): `python benchmarks/robust_cost.py 50`.

The first argument is the number of clients. The updates are random and lie on the GPU if there is one.
"""

import sys
import time

import torch

import fedpara as fp
from fedpara import models
from fedpara.algorithms import FromMean, Mean, Update, Variables
from fedpara.engines.program import make_program
from fedpara.robust import DEFENCES, Blocks, robust_mean
from fedpara.state import State


def step(x: State, server: Variables, mean: Mean, clients: int) -> tuple[State, Variables]:
    return mean.y, server


def main(clients: int, runs: int = 3) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = fp.factorize(
        models.build("vgg16", classes=10, shape=(3, 32, 32)), fp.FedPara(gamma=0.1), models.rule("vgg16")
    )
    program = make_program(model)
    x = {name: program.initial[name].to(device) for name in program.shared}
    updates = [
        Update({n: t + 0.01 * t.std(correction=0) * torch.randn_like(t) for n, t in x.items()}, {}, 1)
        for _ in range(clients)
    ]
    print(f"| defence | seconds, {clients} clients on {device} |\n|---|---|")
    for name in ("mean", "median", "multi-krum", "rfa", "auto"):
        for run in range(runs):
            started = time.perf_counter()
            robust_mean(DEFENCES[name](), Blocks(program.forms), x, updates, [{}] * clients, FromMean(step))
            if device == "cuda":
                torch.cuda.synchronize()
            if run == runs - 1:  # the first one warms up
                print(f"| {name} | {time.perf_counter() - started:.2f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
