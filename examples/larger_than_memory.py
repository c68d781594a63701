"""Train on a federation larger than memory: every client is a file, read when the client is in a cohort.

Data: generated sensor windows, 480 MB in a temporary folder. Takes about five seconds on a CPU.
"""

# --8<-- [start:write]
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms

WIDTH = 1024


def write(folder, clients=24, rows=5000):
    """One file of 20 MB per client, with a sensor's windows of 1024 values, and one with the targets."""
    rule = np.random.default_rng(0).standard_normal(WIDTH, dtype="float32") / WIDTH**0.5
    for client in range(clients + 1):  # the last one is the test set
        rng = np.random.default_rng(client)
        x = rng.standard_normal((rows if client < clients else 500, WIDTH), dtype="float32")
        np.save(Path(folder) / f"x{client}.npy", x)
        np.save(Path(folder) / f"y{client}.npy", np.tanh(x @ rule))


# --8<-- [end:write]


# --8<-- [start:load]
def load(folder, clients=24):
    def read(client):
        return tuple(np.load(Path(folder) / f"{part}{client}.npy", mmap_mode="r") for part in "xy")

    sizes = [len(read(client)[1]) for client in range(clients)]  # from the files' headers
    return fp.FederatedData.of(read, clients=clients, sizes=sizes, test=read(clients))


def network(hidden=32):
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, 1))


# --8<-- [end:load]


# --8<-- [start:run]
def peak():
    """The largest memory that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        write(folder)
        stored = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
        torch.manual_seed(0)
        task = fp.Task(fp.factorize(network(), fp.FedPara(gamma=0.1)), loss="mse", metrics=["r2"])
        algorithm = algorithms.fedavg(lr=0.2, steps=50, batch_size=32)
        before, data = peak(), load(folder)
        run = fp.simulate(task, data, algorithm, rounds=15, cohort=3)
    print(f"R2 {run.score:.3f} after {len(run.rounds)} rounds on {stored:.0f} MB of data")
    print(f"the peak memory grew by less than {-(-(peak() - before) // 20) * 20:.0f} MB")
# --8<-- [end:run]
