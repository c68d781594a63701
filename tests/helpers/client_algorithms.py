"""Algorithms whose clients do more than FedAvg's, as a user writes them: client_algorithms:NAME in an experiment."""

from dataclasses import replace

import torch

import fedpara as fp
from fedpara import algorithms
from fedpara.algorithms import Optimizer
from fedpara.state import add, subtract, zeros_like


def sending(send, name, **local):
    return replace(algorithms.fedavg(**local), name=name, send=send)


def noisy(x, y, visit):
    """Noise from the visit's generator."""
    generator = visit.generator()
    return {n: t + 0.01 * torch.randn(t.shape, generator=generator) for n, t in y.items()}


def top_k(x, y, visit, share=0.1):
    """The largest changes of each tensor; the rest stays as the server sent it."""
    sent = {}
    for name, change in subtract(y, x).items():
        flat = change.flatten()
        kept = flat.abs().topk(max(1, int(share * flat.numel()))).indices
        sent[name] = x[name] + torch.zeros_like(flat).index_copy(0, kept, flat[kept]).view_as(change)
    return sent


def flipped(x, y, visit):
    """Client 2 attacks: it sends the opposite of its change."""
    return add(x, subtract(y, x), -1.0 if visit.client == 2 else 1.0)


def sign_step(y, g, slots, lr):
    """Lion's step without decay: the sign of an average of the gradients, kept in a slot."""
    m = {n: 0.9 * slots["m"][n] + 0.1 * tensor for n, tensor in g.items()}
    return {n: t - lr * torch.tanh(100 * m[n]) for n, t in y.items()}, {"m": m}


def soft_sign():
    return Optimizer("soft-sign", lambda y: {"m": zeros_like(y)}, sign_step)


def own_settings(client):
    """Odd clients train longer; client 2 has its own rate and epochs, client 4 its own batches."""
    if client % 2:
        return {"steps": 5}
    return {2: {"lr": 0.01, "epochs": 1}, 4: {"batch_size": 2, "steps": 7}}.get(client, {})


def noise(**local):
    return sending(noisy, "noise", **local)


def sparse(**local):
    return sending(top_k, "sparse", **local)


def attack(**local):
    return sending(flipped, "attack", **local)


def adam(**local):
    return algorithms.fedavg(**{**local, "optimizer": "adam", "lr": 0.002})


def adamw_kept(**local):
    return algorithms.fedavg(
        **{**local, "optimizer": "adamw", "lr": 0.002, "weight_decay": 0.1, "keep_optimizer": True}
    )


def momentum_kept(**local):
    return algorithms.fedavg(**{**local, "momentum": 0.9, "lr": 0.01, "keep_optimizer": True})


def custom_kept(**local):
    return algorithms.fedavg(**{**local, "optimizer": soft_sign(), "lr": 0.005, "keep_optimizer": True})


def cosine(**local):
    return algorithms.fedavg(**{**local, "schedule": fp.cosine(warmup=1, rounds=4, within=True)})


def own(**local):
    return algorithms.scaffold(**{**local, "per_client": own_settings})


def ditto(**local):
    return algorithms.ditto(0.5, **local)


def ditto_adamw(**local):
    """The personal model has its own rate and steps, and both trainings keep their optimizer."""
    return algorithms.ditto(
        0.1, 0.001, 3, **{**local, "optimizer": "adamw", "lr": 0.002, "keep_optimizer": True}
    )


def distilling(**local):
    return algorithms.fedntd(3.0, 2.0, **local)


NAMES = (
    *("noise", "sparse", "attack", "adam", "adamw_kept", "momentum_kept", "custom_kept"),
    *("cosine", "own", "ditto", "ditto_adamw", "distilling"),
)
