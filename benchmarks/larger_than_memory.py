"""A federation of 20 GB on a machine that is given 4 GB: peak memory of each engine.

    python benchmarks/larger_than_memory.py --data /tmp/large                 writes 200 files of 105 MB, once
    python benchmarks/larger_than_memory.py --data /tmp/large --engine batched

Run the second line in a cgroup with memory.limit_in_bytes = 4 GiB. Each round reads the files of its 10 clients.
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedpara as fp
from fedpara import algorithms

CLIENTS, EXAMPLES, FEATURES = 200, 25_600, 1024


def write(root: Path) -> None:
    root.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    block = generator.standard_normal((EXAMPLES, FEATURES), dtype=np.float32)
    weights = generator.standard_normal(FEATURES).astype(np.float32)
    for client in range(CLIENTS):
        inputs = np.roll(block, 97 * client, axis=0) + np.float32(0.01 * client)
        np.save(root / f"{client}.npy", inputs)
        np.save(root / f"{client}.y.npy", inputs @ weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--engine", choices=("sequential", "batched"), help="left out: write the files")
    args = parser.parse_args()
    if args.engine is None:
        write(args.data)
        return

    def load(client: int) -> tuple[Tensor, Tensor]:
        inputs, targets = (np.load(args.data / f"{client}{end}.npy") for end in ("", ".y"))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    torch.manual_seed(0)
    task = fp.Task(nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1)), loss="mse")
    federation = fp.FederatedData.of(load, clients=CLIENTS, sizes=[EXAMPLES] * CLIENTS)
    algorithm = algorithms.fedavg(lr=1e-3, batch_size=256)
    began = time.perf_counter()
    run = fp.simulate(task, federation, algorithm, rounds=20, cohort=10, engine=args.engine)
    read = len({client for result in run.rounds for client in result.cohort})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{run.engine}\n{time.perf_counter() - began:.0f} s, {read} clients read, peak RSS {peak:.2f} GiB")


if __name__ == "__main__":
    main()
