"""Predict how a disease progresses from ten measurements: tabular regression, one client per age group.

Data: scikit-learn's 442 diabetes patients. Takes about five seconds on a CPU.
"""

# --8<-- [start:data]
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import fedpara as fp
from fedpara import algorithms


def load(clients=8):
    x, y = load_diabetes(return_X_y=True)
    x, y = (((part - part.mean(0)) / part.std(0)).astype("float32") for part in (x, y))
    test = np.arange(len(x)) % 5 == 0
    by_age = x[~test, 0].argsort(kind="stable")
    groups = [np.flatnonzero(~test)[rows] for rows in np.array_split(by_age, clients)]
    return fp.FederatedData.of([(x[rows], y[rows]) for rows in groups], test=(x[test], y[test]))


# --8<-- [end:data]


# --8<-- [start:model]
def network(width=64):
    return nn.Sequential(
        nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


# --8<-- [end:model]

# --8<-- [start:run]
if __name__ == "__main__":
    data = load()
    algorithm = algorithms.fedavg(lr=0.02, epochs=2, batch_size=16)
    runs = {}
    for name, scheme in {"original": None, "FedPara": fp.FedPara(gamma=0.1)}.items():
        torch.manual_seed(0)
        model = network() if scheme is None else fp.factorize(network(), scheme)
        task = fp.Task(model, loss="mse", metrics=["r2", "mae"])
        runs[name] = run = fp.simulate(task, data, algorithm, rounds=30, cohort=4)
        scores = run.rounds[-1].scores
        print(f"{name:8}  R2 {scores['r2']:.3f}, MAE {scores['mae']:.3f}, {run.bytes / 1e6:.2f} MB sent")
# --8<-- [end:run]
