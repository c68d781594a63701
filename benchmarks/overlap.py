"""Does bfloat16 do harm? The first rounds of the paper's CIFAR-10 run: batched in bfloat16, sequential in float32.

    python benchmarks/overlap.py --data-dir DIR   one GPU; about 6 minutes, most of it sequential
    python benchmarks/overlap.py --dataset generated:cifar10 --device cpu --model vgg16-tiny --rounds 1 --cohort 2

Test accuracy after each round, both engines on the same device, from the same seeds. TF32 is off in the sequential one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedpara.engines.local import engine as sequential
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import Program
from fedpara.experiments.config import Experiment
from fedpara.experiments.paper.recipe import experiment
from fedpara.experiments.run import run
from fedpara.tasks import Task


def worker_on(device: torch.device) -> type[Worker]:
    """The sequential engine's worker, which is made for the CPU, on another device: the same steps, one by one."""

    class There(Worker):
        def __init__(self, program: Program, task: Task) -> None:
            super().__init__(program, task, device)

    return There


def accuracies(of: Experiment, data_dir: Path | None) -> list[float]:
    with TemporaryDirectory() as folder:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        found = run(of, Path(folder) / "run", data_dir=data_dir)
        return [float(line["accuracy"]) for line in found.metrics]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", help="left out, the recipe's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cohort", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3, help="of the batched engine")
    parser.add_argument("--sequential", type=int, default=2, help="seeds of the sequential engine")
    args = parser.parse_args()
    sequential.Worker = worker_on(torch.device(args.device))  # type: ignore[attr-defined]
    paper = experiment(
        "CIFAR-10 IID",
        "vgg16",
        gamma=0.1,
        dataset=args.dataset,
        cohort=args.cohort,
        rounds=args.rounds,
        evaluate_every=1,
    )
    if args.model:
        paper = replace(paper, model=args.model)
    card = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    print(f"{card}; torch {torch.__version__}; accuracy [%] after rounds 1 to {args.rounds}\n")
    print(f"| engine | seed | {' | '.join(str(t + 1) for t in range(args.rounds))} |")
    print("|---" * (args.rounds + 2) + "|")
    jobs = [
        (engine, seed)
        for engine, seeds in (("sequential", args.sequential), ("batched", args.seeds))
        for seed in range(seeds)
    ]
    for engine, seed in jobs:
        row = accuracies(replace(paper, engine=engine, seed=seed), args.data_dir)
        print(f"| {engine} | {seed} | {' | '.join(f'{100 * value:.2f}' for value in row)} |", flush=True)


if __name__ == "__main__":
    main()
