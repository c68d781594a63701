"""What a federation survives: one event a run on a SuperLink and three nodes, with TLS and node keys.

    python benchmarks/chaos.py                  every event, about two minutes each on two cores
    python benchmarks/chaos.py link server      some of them

Digits, SCAFFOLD with pFedPara's private factors, so that every client has a memory that must not be lost. Each run
must finish, its log must name the event, and after a kill of a server part the final state must be the one of
the sequential engine, which no event disturbs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedpara.apps.flower.app_folder import CLIENT
from fedpara.apps.flower.federation import Child, Federation, ended
from fedpara.apps.flower.processes import Processes
from fedpara.apps.flower.watchdog import family
from fedpara.experiments import Experiment, read_run, run
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.run_folder import is_locked

NODES, ROUNDS, DEADLINE, LONGEST = 3, 4, 30, 300.0
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

    def rounds(self) -> int:
        return read_run(self.folder).rounds

    def wait(self, what: str, met: Callable[[], bool]) -> None:
        end = time.monotonic() + LONGEST
        while not met():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {LONGEST:g} s")
            time.sleep(0.1)

    def in_round(self, round: int) -> None:
        """Node 1 is at work on its part of the round."""
        self.wait(f"round {round}", lambda: self.rounds() == round - 1)
        log = self.federation.folder / "node-1" / "log.txt"
        self.wait(f"round {round} on node 1", lambda: f"ROUND {round}]" in log.read_text(errors="replace"))

    def finish(self) -> None:
        self.wait("the run", lambda: self.rounds() >= ROUNDS and not is_locked(self.folder))

    def resubmit(self) -> None:
        """The same `flwr run` again."""
        self.federation.processes.stop(self.submitted)
        self.submitted = self.federation.submit()


def nothing(trial: Trial) -> None:
    trial.finish()


def node(trial: Trial) -> None:
    trial.in_round(2)
    trial.federation.processes.kill(trial.nodes[1])
    trial.nodes[1] = trial.federation.start_node(1)
    trial.finish()


def link(trial: Trial) -> None:
    trial.in_round(2)
    trial.federation.processes.kill(trial.link)
    trial.link = trial.federation.start_link()
    trial.resubmit()
    trial.finish()


def server(trial: Trial) -> None:
    trial.in_round(2)
    os.kill(server_app(trial.link), 9)
    ended(trial.submitted, 5)
    trial.resubmit()
    trial.finish()


def misbehaving(trial: Trial) -> None:
    trial.finish()


def server_app(link: Child) -> int:
    """The process of the ServerApp, below its SuperLink."""
    listed = subprocess.run(
        ["ps", "axww", "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    below = family(link.pid)
    named = [line.split(None, 1) for line in listed.splitlines()]
    return next(int(pid) for pid, words in named if int(pid) in below and "flwr-serverapp" in words)


@dataclass(frozen=True)
class Event:
    about: str
    play: Callable[[Trial], None]
    log: str
    """What the run's log must say."""
    same: bool
    fault: str = ""


EVENTS = {
    "nothing": Event("nothing happens", nothing, "node ", same=True),
    "node": Event("kill -9 of a node in mid-round, restarted", node, "round 2: client 1 refused", same=False),
    "link": Event("kill -9 of the SuperLink, restarted", link, "resumed after round 1", same=True),
    "server": Event("kill -9 of the ServerApp", server, "resumed after round 1", same=True),
    "hang": Event("a client that hangs", misbehaving, "round 2: client 1 refused: no reply", False, "hang"),
    "nan": Event("a client that returns NaN", misbehaving, "holds NaN or infinity", False, "nan"),
}


def trial(event: Event, scratch: Path, expected: dict[str, torch.Tensor]) -> tuple[str, float]:
    """ "" or what is wrong, and the seconds it took."""
    started, folder = time.monotonic(), scratch / "run"
    lay_out(EXPERIMENT, folder)
    given: dict[str, str | int | float] = {"out": str(folder), "deadline": DEADLINE, "hello": 20}
    with Processes() as processes:
        federation = Federation(scratch / "federation", NODES, processes, given, {"OMP_NUM_THREADS": "1"})
        if event.fault:
            (federation.folder / "app" / f"{CLIENT}.py").write_text(MISBEHAVES)
        superlink = federation.start_link()
        federation.register()
        faults = [f'fault="{event.fault}"' if i == 1 and event.fault else "" for i in range(NODES)]
        nodes = [federation.start_node(i, more=fault) for i, fault in enumerate(faults)]
        event.play(Trial(federation, folder, superlink, nodes, federation.submit()))
    wrong = []
    if read_run(folder).rounds < ROUNDS:
        wrong.append(f"only {read_run(folder).rounds} rounds")
    if event.log not in (folder / "log.txt").read_text():
        wrong.append(f"the log does not say {event.log!r}: {(folder / 'log.txt').read_text()}")
    state = final_checkpoint(folder).state
    same = all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    if event.same and not same:
        wrong.append("the final state is another one")
    if not all(tensor.isfinite().all() for tensor in state.values()):
        wrong.append("the final state is not finite")
    return "; ".join(wrong), time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events", nargs="*", metavar="EVENT", help=f"of {', '.join(EVENTS)}")
    chosen = parser.parse_args().events or list(EVENTS)
    for name in {*chosen} - {*EVENTS}:
        parser.error(f"no event {name!r}: expected of {', '.join(EVENTS)}.")
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        run(replace(EXPERIMENT, engine="sequential"), Path(name) / "undisturbed")
        expected = final_checkpoint(Path(name) / "undisturbed").state
        print("| event | finished, named in the log, state as it must be | seconds |\n|---|---|---|")
        for key in chosen:
            scratch = Path(name) / key
            scratch.mkdir()
            said, seconds = trial(EVENTS[key], scratch, expected)
            wrong += bool(said)
            same = "yes, bit-equal" if EVENTS[key].same else "yes, finite"
            print(f"| {EVENTS[key].about} | {said or same} | {seconds:.0f} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
