"""Peak memory of a run by the size of its cohort: how many models does a round hold at once?

    python benchmarks/memory.py                     # cohorts of 1, 4, 16 and 64, two algorithms, two engines
    python benchmarks/memory.py --cohorts 1 4

A perceptron of 100 MB (25 million float32 parameters); each client takes one step on four examples. Two rounds, every
client in both. What clients keep lies on disk, as in a run folder. Each case is a process of its own; the peak is its
largest resident set minus what it held before the model was built. The digest is of the final model: the same before
and after a change that should not touch the numbers.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ALGORITHMS, ENGINES, COHORTS = ("fedavg", "scaffold"), ("sequential", "batched"), (1, 4, 16, 64)
WIDTH, DEPTH, EXAMPLES = 2500, 4, 4
MODEL_MB = 4 * (DEPTH * WIDTH * (WIDTH + 1) + 64 * WIDTH + WIDTH + WIDTH * 10 + 10) / 1e6


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(algorithm: str, engine: str, cohort: int) -> dict[str, object]:
    import torch
    from torch import nn

    import fedpara as fp
    from fedpara import algorithms
    from fedpara.data import Examples
    from fedpara.experiments.storage.client_files import OnDisk

    before = peak_mb()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), *layers, nn.Linear(WIDTH, 10))
    count = cohort * EXAMPLES
    images = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8)
    examples = Examples(images, torch.randint(0, 10, (count,)), 10, mean=(0.5,), std=(0.5,))
    clients = [range(i, i + EXAMPLES) for i in range(0, count, EXAMPLES)]
    with tempfile.TemporaryDirectory() as folder:
        run = fp.simulate(
            fp.Task(model),
            fp.FederatedData(examples, clients),
            algorithms.build(algorithm, algorithms.Local(lr=0.01, batch_size=EXAMPLES)),
            rounds=2,
            cohort=cohort,
            engine=engine,
            memory=OnDisk(Path(folder)),
        )
    digest = sha256()
    for tensor in run.state.values():
        digest.update(tensor.contiguous().numpy().data)
    return {"peak_mb": peak_mb() - before, "digest": digest.hexdigest()[:12], "engine": run.engine}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohorts", type=int, nargs="*", default=COHORTS)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        algorithm, engine, cohort = given.case
        print(json.dumps(measure(algorithm, engine, int(cohort))))
        return
    print(f"model {MODEL_MB:.0f} MB; peak of the process beyond its imports")
    print(f"{'algorithm':10} {'engine':10} {'cohort':>6} {'peak [GB]':>9} {'models':>7}  digest")
    for algorithm in ALGORITHMS:
        for engine in ENGINES:
            for cohort in given.cohorts:
                words = [sys.executable, __file__, "--case", algorithm, engine, str(cohort)]
                ended = subprocess.run(words, capture_output=True, text=True)
                if ended.returncode:
                    why = "killed: no memory" if ended.returncode < 0 else ended.stderr.strip()[-300:]
                    print(f"{algorithm:10} {engine:10} {cohort:6} {why}", flush=True)
                    continue
                found = json.loads(ended.stdout.strip().splitlines()[-1])
                peak, digest = float(found["peak_mb"]), found["digest"]
                figures = f"{peak / 1e3:9.2f} {peak / MODEL_MB:7.1f}  {digest}"
                print(f"{algorithm:10} {engine:10} {cohort:6} {figures}", flush=True)


if __name__ == "__main__":
    main()
