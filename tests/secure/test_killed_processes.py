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
HEARTBEAT = 15
"""Seconds. The SuperLink reports a killed node after twice as long; a busy machine must not delay a heartbeat as long."""


@pytest.mark.parametrize(
    ("kills", "counted"),
    [({"keys": 1, "masked": 3}, {0, 2, 4}), ({"shares": 2, "unmask": 4}, {0, 1, 3, 4})],
    ids=["keys and masked", "shares and unmask"],
)
def test_the_round_ends_with_the_sum_of_the_survivors(kills, counted, tmp_path):
    """Two of five nodes: the model is that of a plain round over the clients whose update arrived."""
    killed = tmp_path / "killed"
    killed.mkdir()
    source = Path(fedpara.__file__).parents[1]
    env = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(KILLING), str(source)]),
        "KILL_AT": " ".join(f"{stage}:{client}" for stage, client in kills.items()),
        "KILL_LOG": str(killed),
        "HEARTBEAT": str(HEARTBEAT),
    }
    lay_out(EXPERIMENT, tmp_path / "run")
    with Processes() as processes:
        given = {"out": str(tmp_path / "run"), "deadline": 300, "hello": 300, "wait": 300}
        federation = Federation(tmp_path / "federation", 5, processes, given, env)
        federation.start_link()
        federation.register()
        nodes = [federation.start_node(i) for i in range(5)]
        follow(tmp_path / "run", federation.submit(), tmp_path / "federation" / "run.log", None, None)
        ended = {i for i, node in enumerate(nodes) if node.poll() is not None}
    assert ended == {*kills.values()}
    assert {path.name for path in killed.iterdir()} == {f"{stage}:{c}" for stage, c in kills.items()}
    run_sequentially(
        replace(EXPERIMENT, secure=None),
        tmp_path / "plain",
        lambda round, reply: reply if reply.client in counted else Reply(reply.client, reason="killed"),
    )
    state, plain = (final_checkpoint(tmp_path / name).state for name in ("run", "plain"))
    step = read_secure(EXPERIMENT.secure).step
    assert max(float((state[name] - plain[name]).abs().max()) for name in plain) <= step + 2e-7
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    refused = {one["client"]: one["reason"] for one in line["refused"]}
    gone = {client: stage for stage, client in kills.items() if client not in counted}
    assert refused.keys() == gone.keys(), log(tmp_path / "run")
    assert all(f"it left at the stage '{stage}'" in refused[client] for client, stage in gone.items())
