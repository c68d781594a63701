"""Real SuperNodes on loopback with TLS, killed in the middle of a stage: minutes, so `make test-deploy` runs it."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower_nodes import BASE, log, run_sequentially

import fedpara
from fedpara.apps.flower.federation import Federation
from fedpara.apps.flower.processes import Processes
from fedpara.apps.flower.simulation import follow
from fedpara.engines.client import Reply
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.secure.settings import read_secure

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1200)]

EXPERIMENT = replace(
    BASE, cohort=5, rounds=1, weights="uniform", engine="flower", secure="secagg(clip=4.0, bits=24)"
)
KILLING = Path(__file__).parents[1] / "helpers" / "killing"
HEARTBEAT = 20
"""Seconds. The SuperLink reports a node as gone after twice as long: short for a test, long for a busy machine."""
CASES = {
    "keys-masked": ({"keys": 1, "masked": 3}, {0, 2, 4}),
    "shares-unmask": ({"shares": 2, "unmask": 4}, {0, 1, 3, 4}),
}
"""The client that is killed at each of these stages, and the clients whose update arrives."""


def start(folder, kills, processes):
    """A federation of five nodes that runs the experiment: its nodes, and the submitted run."""
    (folder / "killed").mkdir(parents=True)
    env = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(KILLING), str(Path(fedpara.__file__).parents[1])]),
        "KILL_AT": " ".join(f"{stage}:{client}" for stage, client in kills.items()),
        "KILL_LOG": str(folder / "killed"),
        "HEARTBEAT": str(HEARTBEAT),
    }
    lay_out(EXPERIMENT, folder / "run")
    given = {"out": str(folder / "run"), "deadline": 300, "hello": 300, "wait": 300}
    federation = Federation(folder / "federation", 5, processes, given, env)
    federation.start_link()
    federation.register()
    return [federation.start_node(i) for i in range(5)], federation.submit()


def test_the_round_ends_with_the_sum_of_the_survivors(tmp_path):
    """Two of five nodes: the model is that of a plain round over the clients whose update arrived.

    Both federations at the same time, because they mostly wait for heartbeats that do not come.
    """
    with Processes() as processes:
        started = {name: start(tmp_path / name, kills, processes) for name, (kills, _) in CASES.items()}
        for name, (kills, _) in CASES.items():
            (nodes, submitted), folder = started[name], tmp_path / name
            follow(folder / "run", submitted, folder / "federation" / "run.log", None, None)
            assert {i for i, node in enumerate(nodes) if node.poll() is not None} == {*kills.values()}
    for name, (kills, counted) in CASES.items():
        check(tmp_path / name, kills, counted)


def check(folder, kills, counted):
    assert {path.name for path in (folder / "killed").iterdir()} == {f"{s}:{c}" for s, c in kills.items()}
    run_sequentially(
        replace(EXPERIMENT, secure=None),
        folder / "plain",
        lambda round, reply: reply if reply.client in counted else Reply(reply.client, reason="killed"),
    )
    state, plain = (final_checkpoint(folder / name).state for name in ("run", "plain"))
    step = read_secure(EXPERIMENT.secure).step
    assert max(float((state[name] - plain[name]).abs().max()) for name in plain) <= step + 2e-7
    (line,) = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    refused = {one["client"]: one["reason"] for one in line["refused"]}
    gone = {client: stage for stage, client in kills.items() if client not in counted}
    assert refused.keys() == gone.keys(), log(folder / "run")
    assert all(f"it left at the stage '{stage}'" in refused[client] for client, stage in gone.items())
