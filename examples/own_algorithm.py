"""Write your own algorithms: FedAvgM (Hsu et al., 2019) and FedNova (Wang et al., 2020), both on top of FedAvg.

    FedAvgM   v = beta v + (mean(y_i) - x);   x = x + v
    FedNova   x = x + tau mean((y_i - x) / K_i),   tau = mean(K_i)

Data: two moons, with two custom splits. Takes about twenty seconds on a CPU.
"""

# --8<-- [start:fedavgm]
from dataclasses import replace

import torch
from sklearn.datasets import make_moons
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.algorithms import FromMean, on_any_device
from fedpara.data import Examples
from fedpara.state import add, subtract, zeros_like


def fedavgm(beta=0.9, **local):
    def server_init(x):
        return {"v": zeros_like(x)}

    @on_any_device
    def step(x, server, mean, clients):
        v = add(subtract(mean.y, x), server["v"], beta)
        return add(x, v), {"v": v}

    return replace(
        algorithms.fedavg(**local),
        name="fedavgm",
        server_init=server_init,
        aggregate=FromMean(step),
    )


# --8<-- [end:fedavgm]


# --8<-- [start:fednova]
def fednova(**local):
    def send(x, y, visit):
        return add(x, subtract(y, x), 1 / visit.steps)

    def finish(x, y, down, client, steps, lr):
        return {"path": {"steps": torch.tensor(steps, dtype=torch.float64)}}, {}

    def step(x, server, mean, clients):
        tau = float(mean.extra["path"]["steps"])
        return add(x, subtract(mean.y, x), tau), {}

    return replace(
        algorithms.fedavg(**local),
        name="fednova",
        send=send,
        finish=finish,
        aggregate=FromMean(step),
    )


# --8<-- [end:fednova]


# --8<-- [start:data]
def moons(count, seed):
    points, labels = make_moons(count, noise=0.15, random_state=seed)
    return Examples(torch.tensor(points, dtype=torch.float32), torch.tensor(labels), classes=2)


def load(clients=20, count=2000):
    train, test = moons(count, seed=0), moons(1000, seed=1)
    by_height = train.inputs[:, 1].argsort()
    strips = list(by_height.chunk(clients))  # each client has a horizontal strip
    return fp.FederatedData(train, strips, test=test)


def network(width=64):
    return nn.Sequential(
        nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )


# --8<-- [end:data]


# --8<-- [start:disputed]
def disputed(clients=5, count=1000):
    train, test = moons(count, seed=0), moons(1000, seed=1)
    large, rest = torch.arange(count).split([2 * count // 5, count - 2 * count // 5])
    train.targets[large] = 1 - train.targets[large]  # client 0 swaps the two labels
    return fp.FederatedData(train, [large, *rest.chunk(clients - 1)], test=test)


# --8<-- [end:disputed]


# --8<-- [start:run]
def compare(data, *chosen):
    runs = {}
    for algorithm in chosen:
        torch.manual_seed(0)
        model = fp.factorize(network(), fp.FedPara(gamma=0.3))
        run = fp.simulate(fp.Task(model), data, algorithm, rounds=30, cohort=5)
        runs[algorithm.name] = run
        print(f"{algorithm.name:8} {run.accuracy:.1%} after 30 rounds and {run.bytes / 1e6:.2f} MB")
    return runs


if __name__ == "__main__":
    strips = compare(load(), algorithms.fedavg(lr=0.02), fedavgm(lr=0.02), algorithms.scaffold(lr=0.02))
    # --8<-- [end:run]
    # --8<-- [start:uneven]
    uneven = compare(disputed(), algorithms.fedavg(lr=0.02), fednova(lr=0.02))
    # --8<-- [end:uneven]
