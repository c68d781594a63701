"""An algorithm, data and a split of one's own: FedAvgM (Hsu et al., 2019) on two moons, seconds on a CPU.

    server    v = beta v + (mean(y_i) - x);   x = x + v

An algorithm is a value: seven functions of states, which are dicts of tensors by name. What is not said here is
FedAvg's. Every engine runs it, and `fedpara.simulate` counts what it sends.
"""

from dataclasses import replace

import torch
from sklearn.datasets import make_moons
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.state import add, subtract, zeros_like


def fedavgm(beta=0.9, **local):
    plain = algorithms.fedavg(**local)

    def server_init(x):
        return {"v": zeros_like(x)}

    def aggregate(x, server, updates, clients):
        mean, _ = plain.aggregate(x, {}, updates, clients)
        v = add(subtract(mean, x), server["v"], beta)
        return add(x, v), {"v": v}

    return replace(
        plain, name="fedavgm", server_init=server_init, broadcast=lambda server: {}, aggregate=aggregate
    )


def moons(count, seed):
    points, labels = make_moons(count, noise=0.15, random_state=seed)
    return Examples(torch.tensor(points, dtype=torch.float32), torch.tensor(labels), classes=2)


train, test = moons(2000, seed=0), moons(1000, seed=1)
by_height = train.inputs[:, 1].argsort()
clients = fp.FederatedData(train, list(by_height.split(100)))  # each client sees a strip of the plane

for algorithm in (algorithms.fedavg(lr=0.02), fedavgm(lr=0.02), algorithms.scaffold(lr=0.02)):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = fp.factorize(network, fp.FedPara(gamma=0.3))
    run = fp.simulate(fp.Task(model, test=test), clients, algorithm, rounds=30, cohort=5)
    print(f"{algorithm.name:8} {run.accuracy:.1%} after 30 rounds and {run.bytes / 1e6:.2f} MB")
