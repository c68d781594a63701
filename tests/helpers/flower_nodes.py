"""Flower's nodes in this process, and runs on them and beside them."""

import torch

import fedpara
from fedpara.apps.flower_host import host_on
from fedpara.apps.flower_node import answer
from fedpara.engines.parcels import Order, unpacked
from fedpara.engines.sequential import Sequential
from fedpara.engines.terms import Terms
from fedpara.experiments import Experiment
from fedpara.experiments.checkpoint import final_checkpoint
from fedpara.experiments.run import lay_out, resume

BASE = Experiment(model="mlp", clients=5, cohort=3, rounds=3, epochs=None, steps=2, lr=0.05, batch_size=16)
CASES = {
    "fedavg": {},
    "scaffold": {"algorithm": "scaffold"},
    "feddyn": {"algorithm": "feddyn"},
    "pfedpara": {"scheme": "pfedpara", "personal": True, "link_up": "float16"},
    "fedper": {"scheme": "original", "share": "fedper", "link_up": "int8", "link_down": "bfloat16"},
    "local": {"scheme": "original", "share": "none", "personal": True},
    "pfedpara-scaffold": {"scheme": "pfedpara", "algorithm": "scaffold", "personal": True},
}


class Nodes:
    """A courier whose nodes answer at once, in this process, by a clock that only sleeping moves."""

    def __init__(self, folder, count=3, first=100):
        self.configs = {
            first + k: {"partition-id": k, "num-partitions": count, "memory": str(folder / f"node-{k}")}
            for k in range(count)
        }
        self.keys = {}
        self.now, self.waiting, self.asked = 0.0, {}, []
        self.change = lambda order, parcel: parcel  # what the network or the node makes of an answer
        self.delay = lambda order: 0.0

    def nodes(self):
        return {node: self.keys.get(node, b"") for node in self.configs}

    def send(self, parcels, seconds):
        names = []
        for node, parcel in parcels:
            order = unpacked(parcel, Order, 1 << 30)
            self.asked.append((order.kind, order.round, order.client, node))
            name = f"letter-{len(self.asked)}"
            got = self.change(order, answer(parcel, self.configs[node]))
            self.waiting[name] = (self.now + self.delay(order), got)
            names.append(name)
        return names

    def collect(self, letters):
        ready = [name for name in letters if name in self.waiting and self.waiting[name][0] <= self.now]
        return {name: got for name in ready if (got := self.waiting.pop(name)[1]) is not None}

    def sleep(self, seconds):
        self.now += seconds


def host(courier, terms=None, keys=None, version=fedpara.__version__):
    terms = terms or Terms(deadline=100, wait=5, hello=10)
    return host_on(
        courier, terms, keys, version=version, clock=lambda: courier.now, sleep=lambda s: courier.sleep(s)
    )


def by_flower(experiment, folder, courier=None, **words):
    courier = courier or Nodes(folder.parent / f"{folder.name}-nodes")
    if not (folder / "config.toml").exists():
        lay_out(experiment, folder)
    resume(folder, engine="flower", host=host(courier, **words))
    return courier


def sequentially(experiment, folder, change=None):
    """`change` is what becomes of a reply on its way: the same for both engines."""

    class Disturbed(Sequential):
        def train(self, round, clients, message, personal):
            for reply in super().train(round, clients, message, personal):
                yield change(round, reply) if change else reply

    lay_out(experiment, folder)
    resume(
        folder,
        engine="sequential",
        host=lambda protocol, parts, opened, schedule, tell: (
            Disturbed(protocol, parts.task, parts.data, opened.memory),
            schedule,
        ),
    )


def same(a, b):
    state = final_checkpoint(a).state
    other = final_checkpoint(b).state
    equal = state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    return equal and (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()


def log(folder):
    return (folder / "log.txt").read_text()
