"""How long until the first round? Each network is started three times, from an empty compiler's cache.

    python benchmarks/start.py                  one GPU, all networks: about seven minutes (estimated)
    python benchmarks/start.py --only lstm      one of them; may be repeated
    python benchmarks/start.py --tiny           small networks, also without a GPU: checks only that they run

A round has 16 clients, with 512 random examples each and batch 64. `fedpara` is VGG16 with FedPara at gamma 0.1; the
others have ordinary weights.

Each start is a program of its own. Printed are the seconds from its first line to the end of its first round, and what
of them went by before `simulate` was called: torch, the data, the model. torch must lie there as bytecode, as pip
leaves it: where it does not, set PYTHONPYCACHEPREFIX to a folder; the first start fills it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

NETWORKS = ("fedpara", "vgg16", "resnet18", "vit-tiny", "lstm")


def start(network: str, tiny: bool) -> None:
    """This process is one start."""
    began = time.perf_counter()
    import torch
    from eager_loop import CLIENTS, ViT

    import fedpara as fp
    from fedpara import algorithms, data, models

    size = 4 if tiny else 512
    count, generator = CLIENTS * size, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model: torch.nn.Module
    if network == "lstm":
        model, classes = models.lstm(hidden=8 if tiny else 256), 80
        inputs = torch.randint(0, 80, (count, 80), generator=generator)
    else:
        classes = 10
        inputs = torch.randn(count, 3, 32, 32, generator=generator)
        if network == "vit-tiny":
            model = ViT(16, 1, 2) if tiny else ViT()
        elif network == "resnet18":
            model = models.resnet18(10, shrink=16 if tiny else 1)
        else:
            model = models.vgg16(10, width=4, groups=2) if tiny else models.vgg16(10)
        if network == "fedpara":
            model = fp.factorize(model, fp.FedPara(gamma=0.1))
    targets = torch.randint(0, classes, (count,), generator=generator)
    federation = fp.FederatedData(data.Examples(inputs, targets, classes), data.iid(count, CLIENTS, seed=0))
    called = time.perf_counter()
    fp.simulate(
        fp.Task(model, metrics=[]),
        federation,
        algorithms.fedavg(lr=0.01, batch_size=min(size, 64), epochs=1),
        rounds=1,
        cohort=CLIENTS,
        engine="batched",
    )
    whole = time.perf_counter() - began
    print(f"{whole:6.1f} s to the end of the first round, {called - began:.1f} of them before `simulate`")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=NETWORKS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--here", choices=NETWORKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        start(options.here, options.tiny)
        return
    for network in options.only or NETWORKS:
        with TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            for number in range(1, options.starts + 1):
                print(f"{network}, start {number}: ", end="", flush=True)
                command = [sys.executable, __file__, "--here", network, *["--tiny"] * options.tiny]
                subprocess.run(command, env={**os.environ, **caches}, check=True)


if __name__ == "__main__":
    main()
