"""Nodes that are killed at a stage, on Flower: the round ends with the sum of those who stay, or in one sentence."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

from flower_nodes import BASE, Nodes, log, run_on_nodes

import fedpara.engines.client as client_side
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.secure.messages import STAGES
from fedpara.secure.settings import read_secure

SECURE = replace(BASE, cohort=5, rounds=1, weights="uniform", secure="secagg(clip=4.0, bits=24)")
STEP = read_secure(SECURE.secure).step
WHAT = {
    "keys": "sent their keys",
    "shares": "shared their secrets",
    "masked": "sent their masked update",
    "unmask": "helped to unmask",
}


class Mortal(Nodes):
    """Nodes, some of which are killed at a stage: they lose all that they hold in memory, and answer nothing more.

    They are killed when they get the request, or (`after`) when the work is done and before the response leaves.
    """

    def __init__(self, folder, stage, killed, after=False):
        super().__init__(folder, count=5)
        self.stage, self.killed, self.after, self.dead = stage, killed, after, set()

    def send(self, packets, seconds):
        return [self._one(node, packet, seconds) for node, packet in packets]

    def _one(self, node, packet, seconds):
        dies = node in self.killed and packet.facts["kind"] == self.stage
        if node not in self.dead and (self.after or not dies):
            (name,) = super().send([(node, packet)], seconds)
        else:
            name = "to a dead node"
        if dies:
            self.dead.add(node)
            self.kept.pop(node, None)
            self.waiting.pop(name, None)
        return name


@pytest.fixture
def trained(monkeypatch):
    """What each client's training changed in the shared tensors, by client."""
    changes, reply_of = {}, client_side.reply_of

    def spied(start, trainings, memory, *, client, **words):
        y, x = trainings[0].parameters, start.x
        changes[client] = {name: (y[name].double() - x[name]).numpy() for name in x}
        changes["x"] = {name: x[name].double().numpy() for name in x}
        return reply_of(start, trainings, memory, client=client, **words)

    monkeypatch.setattr(client_side, "reply_of", spied)
    return changes


@pytest.mark.parametrize(("scheme", "after"), [("fedpara", False), ("pfedpara", True)])
@pytest.mark.parametrize("stage", STAGES)
def test_the_survivors_sum_counts(stage, scheme, after, tmp_path, trained):
    """Two of five are killed: the model moves by the mean change of the others, by NumPy, within rounding."""
    transport = Mortal(tmp_path / "nodes", stage, {101, 103}, after)
    run_on_nodes(replace(SECURE, scheme=scheme), tmp_path / "run", transport)
    counted = [0, 1, 2, 3, 4] if stage == "unmask" else [0, 2, 4]
    x = final_checkpoint(tmp_path / "run").progress.x
    for name, start in trained["x"].items():
        mean = np.mean([trained[client][name] for client in counted], axis=0)
        np.testing.assert_allclose(x[name].double().numpy() - start, mean, rtol=0, atol=STEP + 2e-7)
    assert transport.dead == {101, 103}
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    left = f"it left at the stage '{stage}'"
    assert [one["client"] for one in line["refused"]] == ([] if stage == "unmask" else [1, 3])
    assert all(one["reason"].startswith(left) for one in line["refused"])


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_a_round_ends_in_one_sentence(stage, tmp_path, trained):
    """Three of five are killed, and three are needed. No secret is revealed, and the model stays."""
    transport = Mortal(tmp_path / "nodes", stage, {100, 101, 103})
    run_on_nodes(SECURE, tmp_path / "run", transport)
    few = f"2 of 5 clients {WHAT[stage]}: expected at least 3 (threshold 0.6)"
    assert log(tmp_path / "run").count(f"round 1: secure aggregation gave no sum: {few}") == 1
    assert "round 1 had no usable update: the model stays unchanged" in log(tmp_path / "run")
    x = final_checkpoint(tmp_path / "run").progress.x
    for name, start in trained.get("x", {}).items():
        assert np.array_equal(x[name].double().numpy(), start)


@pytest.mark.parametrize("stage", STAGES)
def test_the_next_round_goes_on_without_the_dead(stage, tmp_path):
    transport = Mortal(tmp_path / "nodes", stage, {102}, after=True)
    run_on_nodes(replace(SECURE, rounds=3), tmp_path / "run", transport)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [len(line["refused"]) for line in lines] == [int(stage != "unmask"), 1, 1]
    assert len({line["loss"] for line in lines}) == 3
    assert not any(transport.kept.values()), "secrets are deleted at the end of a round"
