"""Flower nodes inside this process, and the same experiments on the sequential engine."""

import torch

import fedpara
from fedpara.apps.flower.host import host_on
from fedpara.apps.flower.node import respond
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Request, from_packet
from fedpara.engines.local.engine import Sequential
from fedpara.experiments import Experiment, read_run
from fedpara.experiments.run import lay_out, resume
from fedpara.experiments.storage.checkpoint import final_checkpoint

BASE = Experiment(model="mlp", clients=5, cohort=3, rounds=3, epochs=None, steps=2, lr=0.05, batch_size=16)
CASES = {
    "fedavg": {},
    "scaffold": {"algorithm": "scaffold"},
    "feddyn": {"algorithm": "feddyn"},
    "ditto": {"algorithm": "ditto", "options": {"lambda_": 0.5, "personal_steps": 3}, "personal": True},
    "pfedpara": {"scheme": "pfedpara", "personal": True, "link_up": "float16"},
    "fedper": {"scheme": "original", "share": "fedper", "link_up": "int8", "link_down": "bfloat16"},
    "local": {"scheme": "original", "share": "none", "personal": True},
    "own-layer": {"scheme": "fedpara", "share": "all but fc1", "personal": True},
    "refit": {"products": "refit", "aggregation_error": True},
    "pfedpara-scaffold": {"scheme": "pfedpara", "algorithm": "scaffold", "personal": True},
}


class Nodes:
    """A transport whose nodes respond at once in this process. Only sleeping advances its clock."""

    def __init__(self, folder, count=3, first=100):
        self.configs = {
            first + k: {"partition-id": k, "num-partitions": count, "memory": str(folder / f"node-{k}")}
            for k in range(count)
        }
        self.keys = {}
        self.kept = {}  # what each node holds in memory
        self.now, self.waiting, self.asked = 0.0, {}, []
        self.change = lambda request, packet: packet  # alters a response on its way
        self.delay = lambda request: 0.0

    def nodes(self):
        return {node: self.keys.get(node, b"") for node in self.configs}

    def send(self, packets, seconds):
        names = []
        for node, packet in packets:
            request = from_packet(packet, Request, 1 << 30)
            self.asked.append((request.kind, request.round, request.client, node))
            name = f"message-{len(self.asked)}"
            got = self.change(request, respond(packet, self.configs[node], self.kept.setdefault(node, {})))
            self.waiting[name] = (self.now + self.delay(request), got)
            names.append(name)
        return names

    def collect(self, names):
        ready = [name for name in names if name in self.waiting and self.waiting[name][0] <= self.now]
        return {name: got for name in ready if (got := self.waiting.pop(name)[1]) is not None}

    def sleep(self, seconds):
        self.now += seconds


def host(transport, policy=None, keys=None, version=fedpara.__version__):
    policy = policy or Policy(deadline=100, wait=5, hello=10)
    return host_on(
        transport,
        policy,
        keys,
        version=version,
        clock=lambda: transport.now,
        sleep=lambda s: transport.sleep(s),
    )


def run_on_nodes(experiment, folder, transport=None, **words):
    """Run or resume on Flower nodes in this process; returns the transport."""
    transport = transport or Nodes(folder.parent / f"{folder.name}-nodes")
    if not (folder / "config.toml").exists():
        lay_out(experiment, folder)
    resume(folder, engine="flower", host=host(transport, **words))
    return transport


def run_sequentially(experiment, folder, change=None):
    """Run on the sequential engine; `change(round, reply)` alters a reply on its way."""

    class Altered(Sequential):
        def train(self, round, clients, message, personal):
            for reply in super().train(round, clients, message, personal):
                yield change(round, reply) if change else reply

    lay_out(experiment, folder)
    resume(
        folder,
        engine="sequential",
        host=lambda session, parts, opened, schedule, *_: (
            Altered(session, parts.task, parts.data, opened.memory),
            schedule,
        ),
    )


def same_results(a, b):
    """Whether two run folders hold the same model, metrics and clients' scores, bit for bit."""
    state = final_checkpoint(a).state
    other = final_checkpoint(b).state
    equal = state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    lines = [(folder / "metrics.jsonl").read_bytes() for folder in (a, b)]
    return equal and lines[0] == lines[1] and read_run(a).by_client == read_run(b).by_client


def log(folder):
    return (folder / "log.txt").read_text()
