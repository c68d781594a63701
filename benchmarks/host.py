"""What the host does in a round of the batched engine: rounds without training, so that nothing else takes time.

    python benchmarks/host.py                                  # 50 of 1,000 clients, FedAvg, milliseconds per round
    python benchmarks/host.py --algorithm scaffold --profile   # and the functions that take longest

As on a GPU, trained states wait on the device (here the CPU) until the last client ends. The network has eight tensors
of 288 numbers together: what is left is Python, a little for each client.
"""

import argparse
import cProfile
import platform
import pstats
import time
from importlib import import_module
from itertools import pairwise
from statistics import median

import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, data
from fedpara.engines.batched.engine import Batched

CLIENTS, EXAMPLES, COHORT, UNTIMED = 1000, 50, 50, 20


class Untrained(Batched):
    """A batched engine whose steps do nothing, and whose states stay where they are."""

    stays = property(lambda engine: engine.session.algorithm.on_any_device)

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "wait": True})  # type: ignore[arg-type]

    def _tick(self, *_: object) -> object:  # type: ignore[override]
        return lambda: None


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(12, 8)]
    for size in (8, 8, 10):
        layers += [nn.ReLU(), nn.Linear(8, size)]
    return nn.Sequential(*layers)


def federation() -> fp.FederatedData:
    generator = torch.Generator().manual_seed(0)
    count = CLIENTS * EXAMPLES
    images = torch.randint(0, 256, (count, 3, 2, 2), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator)
    train = data.Examples(images, labels, 10, mean=(0.5,) * 3, std=(0.25,) * 3)
    return fp.FederatedData(train, data.iid(labels, CLIENTS, 0))


def milliseconds(algorithm: str, rounds: int, profiler: cProfile.Profile | None) -> list[float]:
    """Of each timed round."""
    ended: list[float] = []

    def end(_: object) -> None:
        ended.append(time.perf_counter())
        if profiler is not None and len(ended) == UNTIMED:
            profiler.enable()

    vars(import_module("fedpara.engines.simulate"))["Batched"] = Untrained
    local = algorithms.Local(lr=0.1, batch_size=10)
    fp.simulate(
        fp.Task(network()),
        federation(),
        algorithms.build(algorithm, local),
        rounds=UNTIMED + rounds,
        cohort=COHORT,
        seed=0,
        engine="batched",
        on_round=end,
    )
    if profiler is not None:
        profiler.disable()
    return [1e3 * (after - before) for before, after in pairwise(ended[UNTIMED - 1 :])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    profiler = cProfile.Profile() if args.profile else None
    found = milliseconds(args.algorithm, args.rounds, profiler)
    threads = torch.get_num_threads()
    print(
        f"{platform.machine()}, {threads} threads, torch {torch.__version__}: {args.algorithm}, {COHORT} clients, "
        f"{median(found):.2f} ms per round ({min(found):.2f})"
    )
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
