"""From how many lanes on does stacking pay on a CPU? CPU time of a round, sequential over batched, one thread.

    OMP_NUM_THREADS=1 python benchmarks/lanes.py            about 3 minutes
    OMP_NUM_THREADS=1 python benchmarks/lanes.py --smoke    only that it runs

Digits, MLP 64-256-10, 2 epochs of 96 examples a client, each cohort as large as it has lanes; the least of three turns.
"""

from __future__ import annotations

import argparse
import platform
import time

import torch

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.engines.batched.engine import Batched
from fedpara.engines.local.engine import Sequential
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.engine import Engine
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import Session
from fedpara.parameterization.schemes import Scheme

CLIENTS = 12
LANES = (1, 2, 3, 4, 5, 6, 8)


def ratio(scheme: Scheme | None, batch_size: int, lanes: int, turns: int) -> float:
    train, _ = data.load("digits")
    torch.manual_seed(0)
    model = models.mlp(64, 256, 10)
    if scheme is not None:
        model = fp.factorize(model, scheme)
    federation = fp.FederatedData(train, data.iid(train.targets[: CLIENTS * 96], CLIENTS, 0))
    method = algorithms.fedavg(lr=0.05, epochs=2, batch_size=batch_size)
    session, task = Session(make_program(model), method, fp.Link(), 0), fp.Task(model)
    engines: tuple[Engine, ...] = (
        Sequential(session, task, federation, InMemory()),
        Batched(
            session, task, federation, InMemory(), cohorts=Cohorts(0, len(federation), lanes), device="cpu"
        ),
    )
    least = [float("inf")] * 2
    for _ in range(turns):
        for i, engine in enumerate(engines):
            started = time.process_time()
            list(
                run_rounds(
                    session,
                    engine,
                    Schedule(2, CLIENTS, lanes, federation.size, evaluate_every=9),
                    personal=False,
                )
            )
            least[i] = min(least[i], time.process_time() - started)
    return least[0] / least[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    lanes, turns = ((1, 2), 1) if smoke else (LANES, 3)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, one thread; torch {torch.__version__}; sequential over batched\n")
    print(f"| weights, batch | {' | '.join(map(str, lanes))} |")
    print("|---" * (len(lanes) + 1) + "|")
    for name, scheme in (("original", None), ("FedPara gamma 0.5", fp.FedPara(gamma=0.5))):
        for batch_size in (10, 32):
            row = [f"{ratio(scheme, batch_size, n, turns):.2f}" for n in lanes]
            print(f"| {name}, {batch_size} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
