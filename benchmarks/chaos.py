"""What a federation survives: one event a run on a SuperLink and three nodes, with TLS and node keys.

    python benchmarks/chaos.py                  every event, about two minutes each on two cores
    python benchmarks/chaos.py link server      some of them
    python benchmarks/chaos.py storm --kills 20 --seed 0

Digits, SCAFFOLD with pFedPara's private factors, so that every client has a memory that must not be lost. Each run
must finish and its log must name the event. Afterwards the final state and what every node keeps must have the same
bits as in a run of the sequential engine that refuses the same clients in the same rounds: none after the kill of a
server part, and after the kill of a node at most its client. A storm is one run with many kills, each of a random
part after a random time; its links have error feedback and send differences, so that nodes must catch up.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedpara.apps.flower.app_folder import CLIENT
from fedpara.apps.flower.federation import Child, Federation, ended
from fedpara.apps.flower.processes import Processes, tail
from fedpara.apps.flower.watchdog import family
from fedpara.engines.client import Reply
from fedpara.engines.local.engine import Sequential
from fedpara.experiments import Experiment, read_run, resume
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.client_files import memory_file
from fedpara.experiments.storage.node_memory import NodeMemory
from fedpara.experiments.storage.run_folder import NODES as RUN_ON_NODES
from fedpara.experiments.storage.run_folder import is_locked
from fedpara.experiments.storage.tensor_files import read_memory
from fedpara.wire import Message

NODES, ROUNDS, DEADLINE, LONGEST = 3, 4, 30, 600.0
EXPERIMENT = Experiment(
    model="mlp",
    scheme="pfedpara",
    algorithm="scaffold",
    personal=True,
    clients=NODES,
    cohort=NODES,
    rounds=ROUNDS,
    lr=0.05,
    engine="flower",
)
MISBEHAVES = '''"""The installed client, and two ways in which one may fail."""

import time

import torch
from flwr.clientapp import ClientApp

from fedpara.apps.flower import client_app as flower_client

from fedpara.apps.flower import grid as flower_grid
from fedpara.engines.flower.rpc import Packet
from fedpara.wire import decode, encode

app = ClientApp()


@app.query()
def hello(message, context):
    return flower_client.hello(message, context)


@app.evaluate()
def score(message, context):
    return flower_client.score(message, context)


@app.train()
def train(message, context):
    fault = context.node_config.get("fault") if message.metadata.group_id == "2" else None
    if fault == "hang":
        time.sleep(3600)
    reply = flower_client.train(message, context)
    if fault == "nan":
        parcel = flower_grid.from_records(reply.content)
        header, state = decode(parcel.body)
        spoilt = encode({name: tensor * torch.nan for name, tensor in state.items()}, header)
        reply.content = flower_grid.to_records(Packet(parcel.facts, spoilt))
    return reply
'''


@dataclass
class Trial:
    federation: Federation
    folder: Path
    link: Child
    nodes: list[Child]
    submitted: Child
    rng: random.Random
    kills: int = 0
    killed: Counter[str] = field(default_factory=Counter)

    def rounds(self) -> int:
        return read_run(self.folder).rounds

    def wait(self, what: str, met: Callable[[], bool]) -> None:
        end = time.monotonic() + LONGEST
        while not met():
            self.federation.restart_ended(self.nodes)
            if time.monotonic() > end:
                logs = (self.folder / "log.txt", self.federation.folder / "run.log")
                told = "\n".join(f"{log.name}: {tail(log, 3000)}" for log in logs)
                raise TimeoutError(f"{what}: not within {LONGEST:g} s\n{told}")
            time.sleep(0.1)

    def returned(self) -> int:
        """How often a restarted node was connected again."""
        logs = self.federation.folder.glob("node-*/log.txt")
        return sum(log.read_text(errors="replace").count("SuperNode ID") for log in logs) - NODES

    def in_round(self, round: int) -> None:
        """Node 1 is at work on its part of the round."""
        self.wait(f"round {round}", lambda: self.rounds() == round - 1)
        log = self.federation.folder / "node-1" / "log.txt"
        self.wait(f"round {round} on node 1", lambda: f"ROUND {round}]" in log.read_text(errors="replace"))

    def finish(self) -> None:
        last = read_run(self.folder).experiment.rounds
        self.wait("the run", lambda: self.rounds() >= last and not is_locked(self.folder))

    def resubmit(self) -> None:
        """The same `flwr run` again."""
        self.federation.processes.stop(self.submitted)
        self.submitted = self.federation.submit()


def nothing(trial: Trial) -> None:
    trial.finish()


def node(trial: Trial) -> None:
    trial.in_round(2)
    kill_node(trial, 1)
    trial.finish()


def link(trial: Trial) -> None:
    trial.in_round(2)
    kill_link(trial)
    trial.finish()


def server(trial: Trial) -> None:
    trial.in_round(2)
    kill_server(trial)
    trial.finish()


def storm(trial: Trial) -> None:
    """Most kills wait for a new round, the others come while the run starts again. The last two rounds are spared."""
    last = read_run(trial.folder).experiment.rounds
    for number in range(1, trial.kills + 1):
        done = trial.rounds() if trial.rng.random() < 0.7 else -1
        trial.wait("a ServerApp", lambda: server_app(trial.link) is not None)
        trial.wait("a new round", lambda done=done: trial.rounds() > done)  # type: ignore[misc]
        time.sleep(trial.rng.uniform(0, 15))
        if trial.rounds() >= last - 2:
            break
        part = trial.rng.choice(["SuperNode", "SuperNode", "ServerApp", "SuperLink"])
        if part == "SuperNode":
            kill_node(trial, trial.rng.randrange(NODES))
        elif part == "ServerApp":
            kill_server(trial)
        else:
            kill_link(trial)
        trial.killed[part] += 1
        print(f"kill {number}, after round {trial.rounds()}: {part}", flush=True)
    trial.finish()


def kill_node(trial: Trial, number: int) -> None:
    trial.federation.processes.kill(trial.nodes[number])
    trial.nodes[number] = trial.federation.start_node(number)  # and again, until Flower admits it


def kill_link(trial: Trial) -> None:
    trial.federation.processes.kill(trial.link)
    trial.link = trial.federation.start_link()
    trial.resubmit()


def kill_server(trial: Trial) -> None:
    if (found := server_app(trial.link)) is not None:
        os.kill(found, 9)
    ended(trial.submitted, 5)
    trial.resubmit()


def misbehaving(trial: Trial) -> None:
    trial.finish()


def server_app(link: Child) -> int | None:
    """The process of the ServerApp, below its SuperLink, if there is one."""
    listed = subprocess.run(
        ["ps", "axww", "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    below = family(link.pid)
    named = [line.split(None, 1) for line in listed.splitlines()]
    found = (int(pid) for pid, words in named if int(pid) in below and "flwr-serverapp" in words)
    return next(found, None)


@dataclass(frozen=True)
class Event:
    about: str
    play: Callable[[Trial], None]
    log: str
    """What the run's log must say."""
    experiment: Experiment = EXPERIMENT
    fault: str = ""


STORM = replace(EXPERIMENT, link_up="topk(0.2, feedback=True)", link_down="int4", lr=0.02)
EVENTS = {
    "nothing": Event("nothing happens", nothing, "node "),
    "node": Event("kill -9 of a node in mid-round, restarted", node, "round 2: client 1 refused"),
    "link": Event("kill -9 of the SuperLink, restarted", link, "resumed after round 1"),
    "server": Event("kill -9 of the ServerApp", server, "resumed after round 1"),
    "hang": Event("a client that hangs", misbehaving, "round 2: client 1 refused: no reply", fault="hang"),
    "nan": Event("a client that returns NaN", misbehaving, "holds NaN or infinity", fault="nan"),
    "storm": Event("many kills, one after another", storm, "node ", STORM),
}


def trial(
    event: Event, scratch: Path, deadline: int, kills: int, rng: random.Random
) -> tuple[str, str, float]:
    """(what happened, "" or what is wrong, the seconds it took)"""
    started, folder = time.monotonic(), scratch / "run"
    rounds = kills + 3 if event.play is storm else ROUNDS
    lay_out(replace(event.experiment, rounds=rounds), folder)
    given: dict[str, str | int | float] = {
        "out": str(folder),
        "deadline": deadline,
        "hello": max(20, deadline),
    }
    with Processes() as processes:
        federation = Federation(scratch / "federation", NODES, processes, given, {"OMP_NUM_THREADS": "1"})
        if event.fault:
            (federation.folder / "app" / f"{CLIENT}.py").write_text(MISBEHAVES)
        superlink = federation.start_link()
        federation.register()
        faults = [f'fault="{event.fault}"' if i == 1 and event.fault else "" for i in range(NODES)]
        nodes = [federation.start_node(i, more=fault) for i, fault in enumerate(faults)]
        tried = Trial(federation, folder, superlink, nodes, federation.submit(), rng, kills)
        event.play(tried)
    happened = ", ".join(f"{count} of a {part}" for part, count in sorted(tried.killed.items()))
    happened += f"; nodes connected again {tried.returned()} times" * bool(happened)
    wrong = []
    if read_run(folder).rounds < rounds:
        wrong.append(f"only {read_run(folder).rounds} rounds")
    if event.log not in (folder / "log.txt").read_text():
        wrong.append(f"the log does not say {event.log!r}: {(folder / 'log.txt').read_text()}")
    wrong += differences(folder, scratch)
    refused = sum(len(line["refused"]) for line in read_run(folder).metrics)
    told = f"{event.about}{': ' * bool(happened)}{happened}; {refused} updates refused"
    return told, "; ".join(wrong), time.monotonic() - started


class Refusing(Sequential):
    """The sequential engine, which loses the replies of the given (round, client)."""

    refused: frozenset[tuple[int, int]] = frozenset()

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        for reply in super().train(round, clients, message, personal):
            lost = (round, reply.client) in self.refused
            yield Reply(reply.client, reason="lost") if lost else reply


SAME = ("round", "accuracy", "loss", "before", "after", "train_loss", "clients", "everyone")
"""The metrics that must agree. Bytes of late replies and the reasons of refusals are the federation's own."""


def differences(folder: Path, scratch: Path) -> list[str]:
    """What differs from a sequential run that refuses the same clients in the same rounds."""
    ours, alone = read_run(folder), scratch / "alone"
    lost = frozenset((line["round"], one["client"]) for line in ours.metrics for one in line["refused"])

    def host(session: Any, parts: Any, opened: Any, schedule: Any) -> tuple[Sequential, Any]:
        engine = Refusing(session, parts.task, parts.data, opened.memory)
        engine.refused = lost
        return engine, schedule

    lay_out(replace(ours.experiment, engine="sequential"), alone)
    resume(alone, host=host)
    state, expected = final_checkpoint(folder), final_checkpoint(alone)
    wrong = []
    if not _same(state.state, expected.state):
        wrong.append("the final state is another one")
    for line, other in zip(ours.metrics, read_run(alone).metrics, strict=True):
        wrong += [f"{name} of round {line['round']}" for name in SAME if line.get(name) != other.get(name)]
    run = (folder / RUN_ON_NODES).read_text().strip()
    for client, round in expected.memories.items():
        home = scratch / "federation" / f"node-{client % NODES}" / "memory"
        kept = NodeMemory(home, run, client).get(round)
        theirs = read_memory(memory_file(alone / "clients", client, round), (client, round))
        if kept is None or any(not _same(kept[name], theirs[name]) for name in theirs):
            wrong.append(f"what the node of client {client} keeps is another memory")
    return wrong


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events", nargs="*", metavar="EVENT", help=f"of {', '.join(EVENTS)}")
    parser.add_argument("--kills", type=int, default=10, help="of the storm")
    parser.add_argument("--seed", type=int, default=0, help="of the storm")
    parser.add_argument(
        "--deadline", type=int, default=DEADLINE, help="seconds of a round; more on a busy machine"
    )
    given = parser.parse_args()
    chosen = given.events or list(EVENTS)
    for name in {*chosen} - {*EVENTS}:
        parser.error(f"no event {name!r}: expected of {', '.join(EVENTS)}.")
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        rows = []
        for key in chosen:
            scratch = Path(name) / key
            scratch.mkdir()
            told, said, seconds = trial(
                EVENTS[key], scratch, given.deadline, given.kills, random.Random(given.seed)
            )
            wrong += bool(said)
            rows.append(f"| {told} | {said or 'yes'} | {seconds:.0f} |")
            print(rows[-1], flush=True)
    print(
        "| event | finished, named in the log, the same bits as the sequential engine | seconds |\n|---|---|---|"
    )
    print("\n".join(rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
