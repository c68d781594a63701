"""Attacks by registered nodes that claim clients of others; the keys file that prevents them.

The log names each attacker, and the honest nodes' run gives the same bits as without it.
"""

import stat
from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, CASES, Nodes, log, run_on_nodes, same_results

from fedpara.apps.flower.certificates import keys_text, read_keys
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Request, Response, from_packet, to_packet
from fedpara.errors import ConfigError
from fedpara.experiments import read_run
from fedpara.wire import decode, encode

ALL = {"client": 0, "clients": 1}


class Attacked(Nodes):
    """Honest nodes and one attacker. Its updates are zeros, so the model shows if one is accepted."""

    def __init__(self, folder, attacker, claim=ALL, **words):
        super().__init__(folder, **words)
        self.attacker, self.claim = attacker, {**claim, "memory": str(folder / "attacker")}
        self.join()

    def join(self):
        self.configs[self.attacker] = self.claim

    def send(self, packets, seconds):
        names = super().send(packets, seconds)
        for (node, packet), name in zip(packets, names, strict=True):
            if node == self.attacker and from_packet(packet, Request, 1 << 30).kind == "train":
                at, got = self.waiting[name]
                response = from_packet(got, Response, 1 << 30)
                header, state = decode(response.message)
                zeros = encode({name: torch.zeros_like(t) for name, t in state.items()}, header)
                self.waiting[name] = at, to_packet(replace(response, message=zeros))
        return names


def trained_by(transport, node):
    return [asked for asked in transport.asked if asked[0] == "train" and asked[3] == node]


@pytest.mark.parametrize("case", ["fedavg", "pfedpara-scaffold"])
@pytest.mark.parametrize("late", [False, True])
def test_a_node_that_claims_every_client_displaces_no_connected_node(tmp_path, case, late):
    """Whether it joins at the start or later: a connected node keeps its clients."""
    experiment = replace(BASE, **CASES[case])
    run_on_nodes(experiment, tmp_path / "a")
    transport = Attacked(tmp_path / "nodes", attacker=999)
    if late:
        del transport.configs[999]

    def join_late(request, packet):
        if request.round == 2:
            transport.join()
        return packet

    transport.change = join_late
    run_on_nodes(experiment, tmp_path / "b", transport)
    assert same_results(tmp_path / "a", tmp_path / "b")
    assert not trained_by(transport, 999)
    assert "node 999 refused: it claims client 0, which node 100 serves" in log(tmp_path / "b")


def test_a_hanging_node_keeps_its_clients_while_connected(tmp_path):
    transport = Attacked(tmp_path / "nodes", attacker=999, claim={"client": 1, "clients": 3})
    del transport.configs[999]

    def hang(request, packet):
        if request.round == 1 and request.client == 1:
            transport.join()
            return None
        return packet

    transport.change = hang
    run_on_nodes(replace(BASE, cohort=5), tmp_path / "a", transport)
    assert read_run(tmp_path / "a").metrics[0]["refused"] == [
        {"client": 1, "reason": "no reply within 100 s"}
    ]
    assert "node 999 refused: it claims client 1, which node 101 serves" in log(tmp_path / "a")
    assert [line["clients"] for line in read_run(tmp_path / "a").metrics] == [4, 5, 5]
    assert not trained_by(transport, 999)


def test_a_disconnected_node_can_be_replaced(tmp_path):
    transport = Attacked(tmp_path / "nodes", attacker=999, claim={"client": 1, "clients": 3})
    del transport.configs[999]

    def replace_it(request, packet):
        if request.round == 1 and 101 in transport.configs and request.client == 4:
            del transport.configs[101]
            transport.join()
        return packet

    transport.change = replace_it
    run_on_nodes(replace(BASE, cohort=5), tmp_path / "a", transport)
    assert [client for _, _, client, _ in trained_by(transport, 999)] == [1, 4, 1, 4]


KEYS = {b"zero": (0, 3), b"one": (1, 3), b"two": (2, 3), b"bad": (2, 3)}


@pytest.mark.parametrize(
    ("key", "claim", "says"),
    [
        (
            b"bad",
            ALL,
            "it claims to be number 0 of 1, and the server's keys file lists its key as number 2 of 3",
        ),
        (
            b"bad",
            {"client": 1, "clients": 3},
            "it claims to be number 1 of 3, and the server's keys file lists",
        ),
        (b"unlisted", ALL, "its key is not in the server's keys file"),
        (b"", {"client": 0, "clients": 3}, "its key is not in the server's keys file"),
    ],
)
def test_a_key_is_bound_to_its_clients(tmp_path, key, claim, says):
    """The attacker says hello first: without a keys file it would get the clients it claims."""
    run_on_nodes(BASE, tmp_path / "a")
    transport = Attacked(tmp_path / "nodes", attacker=1, claim=claim)
    transport.keys = {100: b"zero", 101: b"one", 102: b"two", 1: key}
    run_on_nodes(BASE, tmp_path / "b", transport, keys=KEYS)
    assert same_results(tmp_path / "a", tmp_path / "b")
    assert f"node 1 refused: {says}" in log(tmp_path / "b")
    assert not trained_by(transport, 1)


def test_a_spare_node_takes_over_when_the_first_leaves(tmp_path):
    """The keys file may list two keys for the same clients."""
    transport = Nodes(tmp_path / "nodes")
    transport.keys = {100: b"zero", 101: b"one", 102: b"two", 103: b"bad"}
    transport.configs[103] = transport.configs[102]

    def leave(request, packet):
        if request.round == 2 and request.client == 4:
            del transport.configs[102]
        return packet

    transport.change = leave
    run_on_nodes(replace(BASE, cohort=5, rounds=3), tmp_path / "a", transport, keys=KEYS)
    assert "node 103 refused: it claims client 2, which node 102 serves" in log(tmp_path / "a")
    assert "node 103 is number 2 of 3" in log(tmp_path / "a")
    assert trained_by(transport, 103) == [("train", 3, 2, 103)]


def test_the_keys_file_that_certs_writes_can_be_read(tmp_path):
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization

    from fedpara.apps.flower.certificates import make_certificates

    make_certificates(tmp_path / "keys", ["localhost"], 2)
    pem = [
        serialization.load_ssh_public_key((tmp_path / "keys" / f"node-{i}.pub").read_bytes()).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        for i in range(2)
    ]
    assert read_keys(tmp_path / "keys" / "nodes.toml") == {pem[0]: (0, 2), pem[1]: (1, 2)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'node'"),
        ("[[node", "cannot be read"),
        ("node = 3", "cannot be read"),
        ("[[node]]\nclient = 0\nclients = 1", "'key'"),
        ('[[node]]\nkey = "no key"\nclient = 0\nclients = 1', "cannot be read"),
        ('[[node]]\nkey = "ssh-none AAAA"\nclient = 0\nclients = 1', "cannot be read"),
        ('[[node]]\nkey = "a"\nclient = 3\nclients = 3', "has 3 of 3: expected whole numbers"),
    ],
)
def test_an_invalid_keys_file(tmp_path, text, says):
    pytest.importorskip("cryptography")
    (tmp_path / "nodes.toml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_keys(tmp_path / "nodes.toml")


def test_a_missing_keys_file_and_a_duplicate_key(tmp_path):
    pytest.importorskip("cryptography")
    from fedpara.apps.flower.certificates import make_certificates

    with pytest.raises(ConfigError, match=r"none.toml cannot be read: No such file"):
        read_keys(tmp_path / "none.toml")
    make_certificates(tmp_path / "keys", ["localhost"], 1)
    key = (tmp_path / "keys" / "node-0.pub").read_text()
    (tmp_path / "twice.toml").write_text(keys_text([key, key]))
    with pytest.raises(ConfigError, match="lists a key twice"):
        read_keys(tmp_path / "twice.toml")


def test_only_the_owner_can_read_the_folders_of_a_nodes_memory(tmp_path):
    run_on_nodes(
        replace(BASE, rounds=1, **CASES["scaffold"]), tmp_path / "a", Nodes(tmp_path / "new" / "nodes")
    )
    made = [path for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")) if path.is_dir()]
    assert {path.name for path in made} > {"new", "nodes", "node-0"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


def test_a_rejected_claim_does_not_delay_the_round(tmp_path):
    transport = Attacked(tmp_path / "nodes", attacker=999)
    run_on_nodes(BASE, tmp_path / "a", transport, policy=Policy(deadline=100, wait=5))
    assert transport.now == 0
