"""A real SuperNode that is killed and restarted: half a minute, so `make test-deploy` runs it."""

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

import fedpara
from fedpara.apps.flower.federation import Federation, ended
from fedpara.apps.flower.processes import Processes

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]

KILLING = Path(__file__).parents[3] / "helpers" / "killing"
HEARTBEAT = 10
"""Seconds, the shortest that Flower accepts."""


def test_a_killed_node_and_a_killed_superlink_are_connected_again(tmp_path):
    """Flower refuses a key that counts as connected. If it no longer does, `restart_ended` has less to do."""
    source = Path(fedpara.__file__).parents[1]
    env = {"PYTHONPATH": os.pathsep.join([str(KILLING), str(source)]), "HEARTBEAT": str(HEARTBEAT)}
    log = tmp_path / "federation" / "node-0" / "log.txt"

    def wait_for(words, times=1):
        end = time.monotonic() + 120
        while log.read_text().count(words) < times:
            federation.restart_ended(nodes)
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    with Processes() as processes:
        federation = Federation(tmp_path / "federation", 1, processes, {}, env)
        link = federation.start_link()
        federation.register()
        nodes = [federation.start_node(0)]
        wait_for("SuperNode ID")
        again = federation.start_node(0)
        assert ended(again, 120)
        assert "Failed to activate SuperNode" in log.read_text()
        processes.kill(nodes[0])
        wait_for("SuperNode ID", times=2)
        failed = log.read_text().count("Connection attempt failed")
        processes.kill(link)
        # A node that asks nobody meanwhile says nothing.
        wait_for("Connection attempt failed", times=failed + 1)
        federation.start_link()
        wait_for("Connection successful")
        assert nodes[0].poll() is None
