"""Nodes that join, leave, hang or do not fit the run: the round goes on, and the log names them."""

import time
from dataclasses import replace

import pytest
from flower_nodes import BASE, CASES, Nodes, log, run_on_nodes

import fedpara
from fedpara.apps.flower import node as flower_node
from fedpara.apps.flower.node import respond
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Hello, Packet, Request, from_packet, to_packet
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import read_run, run
from fedpara.experiments.config_file import to_toml
from fedpara.experiments.run import lay_out, resume

HELLOS = {
    "version": (
        lambda h: replace(h, version="0.0.9"),
        "it runs fedpara 0.0.9, the server 0.1.0: install the same",
    ),
    "scheme": (lambda h: replace(h, scheme="dense"), "its model is 'dense', the server's 'fedpara'"),
    "shapes": (
        lambda h: replace(h, digest="0"),
        "its model has other names, shapes or types than the server's",
    ),
    "number": (lambda h: replace(h, first=7), "it is number 7 of 3"),
    "data": (lambda h: replace(h, reason="its files are gone"), "its files are gone"),
}


@pytest.mark.parametrize("case", HELLOS)
def test_a_node_that_does_not_fit_is_rejected_before_any_training(tmp_path, case):
    change, says = HELLOS[case]
    transport = Nodes(tmp_path / "nodes")
    mine = 101
    sent = transport.send

    def send(packets, seconds):
        names = sent(packets, seconds)
        for (node, _), name in zip(packets, names, strict=True):
            if node == mine:
                at, packet = transport.waiting[name]
                transport.waiting[name] = at, to_packet(change(from_packet(packet, Hello, 0)))
        return names

    transport.send = send
    run_on_nodes(replace(BASE, cohort=5), tmp_path / "a", transport)
    assert f"node {mine} refused: {says}" in log(tmp_path / "a")
    assert not [asked for asked in transport.asked if asked[0] == "train" and asked[3] == mine]
    for line in read_run(tmp_path / "a").metrics:
        assert [entry["client"] for entry in line["refused"]] == [1, 4]
        assert all("no node serves it" in entry["reason"] for entry in line["refused"])


def test_a_round_without_nodes_stops_the_run(tmp_path):
    """Whether no node fits or none is connected. The run resumes once nodes are back."""
    transport = Nodes(tmp_path / "nodes")
    with pytest.raises(RunError, match=r"it runs fedpara 0.1.0, the server 9.9: install the same"):
        run_on_nodes(BASE, tmp_path / "a", transport, version="9.9")
    there, transport.configs = transport.configs, {}
    with pytest.raises(
        RunError, match=r"0 of the round's 3 clients have a node after 5 s; the policy needs 1\."
    ):
        run_on_nodes(BASE, tmp_path / "a", transport)
    assert read_run(tmp_path / "a").rounds == 0
    transport.configs = there
    run_on_nodes(BASE, tmp_path / "a", transport)
    assert read_run(tmp_path / "a").rounds == 3


def test_a_node_may_leave_and_another_join(tmp_path):
    transport = Nodes(tmp_path / "nodes")
    gone, late = 102, {}

    def leave(request, packet):
        if request.round == 1 and gone in transport.configs and request.client == 4:
            late["config"] = transport.configs.pop(gone)
        if request.round == 2 and request.client == 4:
            transport.configs[999] = late["config"]
        return packet

    transport.change = leave
    run_on_nodes(replace(BASE, cohort=5, **CASES["scaffold"]), tmp_path / "a", transport)
    clients = [line["clients"] for line in read_run(tmp_path / "a").metrics]
    assert clients == [5, 4, 5]
    assert [entry["client"] for entry in read_run(tmp_path / "a").metrics[1]["refused"]] == [2]


def test_a_hanging_client_does_not_block_its_node(tmp_path, monkeypatch):
    real = flower_node.train

    def slow(request, config):
        if request.client == 1:
            time.sleep(3)
        return real(request, config)

    monkeypatch.setattr(flower_node, "train", slow)
    run_on_nodes(replace(BASE, rounds=1, cohort=5), tmp_path / "a", policy=Policy(deadline=1, wait=5))
    (refused,) = read_run(tmp_path / "a").metrics[0]["refused"]
    assert refused == {"client": 1, "reason": "it did not finish within 0.9 s"}


def test_a_client_that_wakes_late_waits_for_its_turn(tmp_path, monkeypatch):
    """It finds the site of the present requests, whose worker trains one client at a time."""
    train, client_round, training, most = flower_node.train, flower_node.client_round, [], []

    def slow(request, config):
        if request.client == 1:
            time.sleep(1.2)
        return train(request, config)

    def counted(*given, **named):
        training.append(1)
        most.append(len(training))
        time.sleep(0.2)
        try:
            return client_round(*given, **named)
        finally:
            training.pop()

    monkeypatch.setattr(flower_node, "train", slow)
    monkeypatch.setattr(flower_node, "client_round", counted)
    run_on_nodes(replace(BASE, rounds=1, cohort=5), tmp_path / "a", policy=Policy(deadline=1, wait=5))
    assert max(most) == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "does not say which clients it serves"),
        ({"partition-id": 3, "num-partitions": 3}, "(partition-id, num-partitions) has 3 of 3"),
        ({"partition-id": "a", "num-partitions": 3}, "has 'a' of 3"),
        ({"client": 0}, "(client, clients) has 0 of None"),
    ],
)
def test_a_node_must_say_which_clients_it_serves(config, says):
    request = Request("hello", to_toml(BASE), fedpara.__version__, "0", 10.0)
    assert says in from_packet(respond(to_packet(request), config), Hello, 0).reason


@pytest.mark.parametrize("seconds", [1e10, float("nan"), -1.0])
def test_a_node_rejects_a_request_with_invalid_seconds(seconds):
    request = Request("hello", to_toml(BASE), fedpara.__version__, "0", seconds)
    given = from_packet(respond(to_packet(request), {"partition-id": 0, "num-partitions": 3}), Hello, 0)
    assert given.reason.startswith(f"the request grants {seconds:g} s: expected above 0, at most ")


OWN = """
import torch
from fedpara.data import Examples
def load(config):
    if config.get("site") == "broken":
        raise OSError("the disk is gone")
    images = torch.arange(20 * 64, dtype=torch.uint8).reshape(20, 1, 8, 8)
    some = Examples(images, torch.arange(20) % 10, 10, None, (0.5,), (0.5,))
    return some.subset([]) if config.get("server") else some, some
"""


def test_a_node_brings_its_own_data(tmp_path, monkeypatch):
    (tmp_path / "hospital.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = replace(BASE, dataset="load:hospital:load", clients=3, engine="flower")
    transport = Nodes(tmp_path / "nodes")
    transport.configs[102]["site"] = "broken"
    run_on_nodes(experiment, tmp_path / "a", transport)
    assert [line["clients"] for line in read_run(tmp_path / "a").metrics] == [2, 2, 2]
    assert "node 102 refused: 'hospital:load' failed: OSError: the disk is gone" in log(tmp_path / "a")
    assert read_run(tmp_path / "a").accuracy is not None
    with pytest.raises(ConfigError, match="use --engine flower"):
        lay_out(replace(experiment, engine="sequential"), tmp_path / "b")


def test_run_and_resume_reject_engine_flower(tmp_path):
    """Flower launches the server, not the reverse. The mistake leaves no files behind."""
    with pytest.raises(ConfigError, match="fedpara run --engine flower"):
        run(replace(BASE, engine="flower"), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    lay_out(BASE, tmp_path / "b")
    with pytest.raises(ConfigError, match="fedpara run --engine flower"):
        resume(tmp_path / "b", engine="flower")
    assert read_run(tmp_path / "b").experiment.engine == "auto"


def test_a_late_node_takes_part_in_the_first_round(tmp_path):
    """`wait` counts from the start of the round, whatever the clock says."""
    transport = Nodes(tmp_path / "nodes")
    transport.now, late = 1000.0, transport.configs.pop(102)

    def sleep(seconds):
        transport.now += seconds
        if transport.now >= 1002:
            transport.configs[102] = late

    transport.sleep = sleep
    run_on_nodes(replace(BASE, rounds=1, cohort=5), tmp_path / "a", transport)
    assert read_run(tmp_path / "a").metrics[0]["clients"] == 5


def test_a_lost_hello_is_requested_again(tmp_path):
    transport, hellos = Nodes(tmp_path / "nodes"), []

    def lose_the_first(request, packet):
        hellos.append(request.kind)
        return None if hellos == ["hello"] else packet

    transport.change = lose_the_first
    policy = Policy(deadline=100, wait=5, hello=1)
    run_on_nodes(replace(BASE, rounds=1, cohort=5), tmp_path / "a", transport, policy=policy)
    assert hellos.count("hello") == 4
    assert read_run(tmp_path / "a").metrics[0]["clients"] == 5


def test_a_rejected_node_is_asked_once_per_round(tmp_path):
    transport = Nodes(tmp_path / "nodes")
    transport.configs[102]["num-partitions"] = 0
    run_on_nodes(replace(BASE, rounds=2, cohort=5), tmp_path / "a", transport)
    assert [line["clients"] for line in read_run(tmp_path / "a").metrics] == [4, 4]
    assert len([node for kind, _, _, node in transport.asked if kind == "hello" and node == 102]) == 2


@pytest.mark.parametrize(("first", "every"), [(0, 0), (3, 3)])
def test_a_node_with_invalid_numbers_is_rejected(tmp_path, first, every):
    """Otherwise client % 0 would crash the server."""
    transport = Nodes(tmp_path / "nodes")

    def spoil(request, packet):
        hello = request.kind == "hello" and packet.facts["first"] == 1
        return Packet({**packet.facts, "first": first, "every": every}) if hello else packet

    transport.change = spoil
    run_on_nodes(replace(BASE, rounds=1, cohort=5), tmp_path / "a", transport)
    assert f"node 101 refused: it is number {first} of {every}: expected" in log(tmp_path / "a")
