"""Simulate a federation and compare schemes by accuracy and bytes sent.

Data: scikit-learn's digits, split unevenly among 20 clients. Takes about ten seconds on a CPU.
"""

# --8<-- [start:data]
import torch

import fedpara as fp
from fedpara import algorithms, data, models

train, test = data.load("digits")
clients = fp.FederatedData(train, data.dirichlet(train.targets, clients=20, alpha=0.5, seed=0))
# --8<-- [end:data]

# --8<-- [start:run]
local = algorithms.Local(lr=0.1, lr_decay=0.95, epochs=2, batch_size=32, momentum=0.9, clip=2.0)
algorithm = algorithms.fedavg(local=local)
schemes = {
    "original": (None, fp.Link()),
    "low-rank": (fp.LowRank(gamma=0.0), fp.Link()),
    "FedPara": (fp.FedPara(gamma=0.0), fp.Link()),
    "FedPara, float16 uplink": (fp.FedPara(gamma=0.0), fp.Link(up="float16")),
}

runs = {}
for name, (scheme, link) in schemes.items():
    torch.manual_seed(0)
    model = models.mlp(inputs=64, classes=10, layers=2)
    if scheme is not None:
        model = fp.factorize(model, scheme)
    task = fp.Task(model, test=test)
    runs[name] = fp.simulate(task, clients, algorithm, link=link, rounds=20, cohort=5, seed=0)
# --8<-- [end:run]

# --8<-- [start:print]
for name, run in runs.items():
    print(f"{name:24} {run.accuracy:.1%} after {run.bytes / 1e6:5.2f} MB")
# --8<-- [end:print]
