"""What it costs that clients keep something: a round of FedAvg, FedDyn and SCAFFOLD with almost no training in it.

    python benchmarks/keeping.py

16 clients, one step of 16 small images each, 248 tensors of 6.2 MB in all, as VGG16 has at gamma 0.1. FedDyn keeps
a state a client in a file; SCAFFOLD does too, and sends twice as much. `synced` also puts the round's files on the disk
(`OnDisk.secure`), as a run folder does before each checkpoint. Three turns of ten rounds each, in random order within a
turn; the first two rounds of a turn do not count. Files go to the temporary folder: set TMPDIR where that is in memory.
"""

import argparse
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.engines.progress import Round
from fedpara.experiments.storage.client_files import OnDisk

CLIENTS, IMAGES, WIDTH, DEPTH = 16, 16, 112, 122


def deep() -> nn.Module:
    torch.manual_seed(0)
    inner = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), *inner, nn.Linear(WIDTH, 10))


def federation() -> fp.FederatedData:
    torch.manual_seed(0)
    count = CLIENTS * IMAGES
    images = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8)
    examples = Examples(images, torch.randint(0, 10, (count,)), 10, mean=(0.5,), std=(0.5,))
    return fp.FederatedData(examples, [range(i, i + IMAGES) for i in range(0, count, IMAGES)])


def seconds(name: str, rounds: int = 10) -> tuple[list[float], list[float]]:
    """Of each round but the first two, which make the step and the first files, and of syncing in each."""
    ended: list[float] = []
    syncing: list[float] = []
    algorithm, _, synced = name.partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        memory = OnDisk(Path(folder))

        def end(result: Round) -> None:
            began = time.perf_counter()
            if synced:
                memory.secure(result.number, result.memories)
            syncing.append(time.perf_counter() - began)
            memory.settle(result.number - 1)
            ended.append(time.perf_counter())

        fp.simulate(
            fp.Task(deep()),
            federation(),
            algorithms.build(algorithm, algorithms.Local(lr=0.01, batch_size=IMAGES)),
            rounds=rounds,
            cohort=CLIENTS,
            engine="batched",
            memory=memory,
            on_round=end,
        )
    return [after - before for before, after in pairwise(ended[1:])], syncing[2:]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    where = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(f"fedpara {fp.__version__}, torch {torch.__version__}, {where}; seconds a round, median (least)")
    names = ["fedavg", "feddyn", "feddyn synced", "scaffold", "scaffold synced"]
    found: dict[str, list[float]] = {name: [] for name in names}
    syncing: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(3):
        for name in random.sample(names, len(names)):
            rounds, syncs = seconds(name)
            found[name] += rounds
            syncing[name] += syncs
    for name in names:
        over, sync = median(found[name]) - median(found["fedavg"]), median(syncing[name])
        line = f"{name:16s} {median(found[name]):.3f} ({min(found[name]):.3f})   over fedavg {over:.3f}"
        print(
            line + (f"   of which syncing {sync:.3f} ({min(syncing[name]):.3f})" if "synced" in name else "")
        )


if __name__ == "__main__":
    main()
