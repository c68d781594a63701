"""Secure aggregation on Flower's nodes: the same bits as in a simulation, and responses that are refused."""

from dataclasses import replace

import pytest

pytest.importorskip("flwr")

from flower_nodes import BASE, Nodes, log, run_on_nodes, run_sequentially, same_results

from fedpara.engines.flower.policy import Policy
from fedpara.errors import ConfigError
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint

SECURE = replace(BASE, cohort=5, rounds=2, secure="secagg(clip=4.0, bits=24)")


@pytest.mark.parametrize(
    "changes", [{}, {"scheme": "pfedpara", "personal": True}, {"lost": 0.2, "cohort": 4}]
)
def test_nodes_give_the_bits_of_a_simulation(tmp_path, changes):
    """Their keys are random, and masks cancel exactly. Five clients share three nodes."""
    experiment = replace(SECURE, **changes)
    run_on_nodes(experiment, tmp_path / "flower")
    run_sequentially(experiment, tmp_path / "sequential")
    state, other = (final_checkpoint(tmp_path / name).state for name in ("flower", "sequential"))
    assert all(bool((state[name] == other[name]).all()) for name in state)
    if "lost" not in changes:  # a lost client is not asked on Flower, and leaves later in a simulation
        assert same_results(tmp_path / "flower", tmp_path / "sequential")


def test_a_node_that_restarts_in_a_round_has_left_it(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)

    def change(request, packet):
        if (request.kind, request.client, request.round) == ("shares", 3, 1):
            transport.kept[103].clear()
        return packet

    transport.change = change
    run_on_nodes(SECURE, tmp_path / "run", transport)
    assert "client 3 refused: it left at the stage 'masked': this node has no secrets" in log(
        tmp_path / "run"
    )
    assert not any(transport.kept.values()), "secrets are deleted at the end of a round"


@pytest.mark.parametrize(
    "body",
    [b"", b"FPM1" + bytes(50), b"\x80\x04N.", b"x" * 10_000_000],
    ids=["empty", "damaged", "pickle", "huge"],
)
def test_hostile_responses_are_refused(tmp_path, body):
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = lambda request, packet: (
        replace(packet, body=body) if (request.kind, request.client) == ("masked", 4) else packet
    )
    run_on_nodes(SECURE, tmp_path / "run", transport)
    assert log(tmp_path / "run").count("client 4 refused") == 2


def test_a_node_can_insist_on_secure_aggregation(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    for config in transport.configs.values():
        config["only-secure"] = True
    run_on_nodes(replace(SECURE, rounds=1, secure=None), tmp_path / "plain", transport)
    assert "this node sends updates only under secure aggregation (only-secure in its config)" in log(
        tmp_path / "plain"
    )
    assert "no usable update" in log(tmp_path / "plain")


def test_late_replies_of_a_stage_are_counted_and_refused(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.delay = lambda request: (
        150.0 if (request.kind, request.client, request.round) == ("masked", 1, 1) else 0.0
    )
    run_on_nodes(SECURE, tmp_path / "run", transport, policy=Policy(deadline=100, wait=5, hello=10))
    assert "client 1 refused: it left at the stage 'masked': no reply within 100 s" in log(tmp_path / "run")


def test_mistakes_leave_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="max_norm checks each update"):
        lay_out(replace(SECURE, engine="flower", max_norm=1.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()
