"""How long until the first round? The paper's CIFAR-10 run, started three times, from an empty compiler's cache.

    python benchmarks/start.py --data-dir DIR   one GPU; about 3 minutes
    python benchmarks/start.py --dataset generated:cifar10 --model vgg16-tiny --cohort 2   also without one

Each start is a program of its own. Seconds from its first line to the end of its first round, and what of them went by
before the engine was asked for that round: torch, the data, the model. torch must lie there as bytecode, as pip
leaves it: where it does not, set PYTHONPYCACHEPREFIX to a folder; the first start fills it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory


def start(options: argparse.Namespace, folder: Path) -> None:
    """This process is one start."""
    began = time.perf_counter()
    from fedpara.experiments.paper.recipe import experiment
    from fedpara.experiments.run import run

    of = experiment(
        "CIFAR-10 IID", "vgg16", gamma=0.1, dataset=options.dataset, cohort=options.cohort, rounds=1
    )
    of = replace(of, engine="batched", **({"model": options.model} if options.model else {}))

    def on_round(_: object, timing: dict[str, float]) -> None:
        whole = time.perf_counter() - began
        print(
            f"{whole:6.1f} s to the end of the first round, {whole - timing['seconds']:.1f} of them before it began"
        )

    run(of, folder, data_dir=options.data_dir, on_round=on_round)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model")
    parser.add_argument("--cohort", type=int, default=16)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        start(options, options.run)
        return
    with TemporaryDirectory() as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled",
            "TRITON_CACHE_DIR": f"{folder}/compiled/triton",
        }
        for number in range(1, options.starts + 1):
            print(f"start {number}: ", end="", flush=True)
            again = [sys.executable, *sys.argv, "--run", f"{folder}/{number}"]
            subprocess.run(again, env={**os.environ, **caches}, check=True)


if __name__ == "__main__":
    main()
