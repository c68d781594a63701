"""Attacks by registered nodes: one that claims every client, one that claims 2^62 examples.

Each is refused by name, and the honest nodes' run ends with the same bits as without the attacker.
"""

import json
import stat
from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, CASES, Nodes, by_flower, host, log, same

from fedpara.apps.flower.certificates import keys_text, read_keys
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Packet, Request, Response, from_packet, to_packet
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import read_run
from fedpara.experiments.run import resume
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.wire import decode, encode

ALL = {"client": 0, "clients": 1}


class Attacked(Nodes):
    """Honest nodes, and one whose updates are all zeros: were one of them taken, the model would show it."""

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
                answer = from_packet(got, Response, 1 << 30)
                header, state = decode(answer.message)
                zeros = encode({name: torch.zeros_like(t) for name, t in state.items()}, header)
                self.waiting[name] = at, to_packet(replace(answer, message=zeros))
        return names


def trained_by(transport, node):
    return [asked for asked in transport.asked if asked[0] == "train" and asked[3] == node]


@pytest.mark.parametrize("case", ["fedavg", "pfedpara-scaffold"])
@pytest.mark.parametrize("late", [False, True])
def test_a_node_that_claims_every_client_displaces_no_living_one(tmp_path, case, late):
    """At the start, or once the honest nodes are at work: a node that is connected keeps its clients."""
    experiment = replace(BASE, **CASES[case])
    by_flower(experiment, tmp_path / "a")
    transport = Attacked(tmp_path / "nodes", attacker=999)
    if late:
        del transport.configs[999]

    def come(order, packet):
        if order.round == 2:
            transport.join()
        return packet

    transport.change = come
    by_flower(experiment, tmp_path / "b", transport)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not trained_by(transport, 999)
    assert "node 999 refused: it claims client 0, which node 100 serves" in log(tmp_path / "b")


def test_a_node_that_hangs_keeps_its_clients_while_it_is_connected(tmp_path):
    transport = Attacked(tmp_path / "nodes", attacker=999, claim={"client": 1, "clients": 3})
    del transport.configs[999]

    def hang(order, packet):
        if order.round == 1 and order.client == 1:
            transport.join()
            return None
        return packet

    transport.change = hang
    by_flower(replace(BASE, cohort=5), tmp_path / "a", transport)
    assert read_run(tmp_path / "a").metrics[0]["refused"] == [
        {"client": 1, "reason": "no reply within 100 s"}
    ]
    assert "node 999 refused: it claims client 1, which node 101 serves" in log(tmp_path / "a")
    assert [line["clients"] for line in read_run(tmp_path / "a").metrics] == [4, 5, 5]
    assert not trained_by(transport, 999)


def test_a_node_that_is_gone_can_be_replaced(tmp_path):
    transport = Attacked(tmp_path / "nodes", attacker=999, claim={"client": 1, "clients": 3})
    del transport.configs[999]

    def replace_it(order, packet):
        if order.round == 1 and 101 in transport.configs and order.client == 4:
            del transport.configs[101]
            transport.join()
        return packet

    transport.change = replace_it
    by_flower(replace(BASE, cohort=5), tmp_path / "a", transport)
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
    """The attacker says hello before all others: without a keys file it would have the clients it claims."""
    by_flower(BASE, tmp_path / "a")
    transport = Attacked(tmp_path / "nodes", attacker=1, claim=claim)
    transport.keys = {100: b"zero", 101: b"one", 102: b"two", 1: key}
    by_flower(BASE, tmp_path / "b", transport, keys=KEYS)
    assert same(tmp_path / "a", tmp_path / "b")
    assert f"node 1 refused: {says}" in log(tmp_path / "b")
    assert not trained_by(transport, 1)


def test_a_spare_node_with_the_same_numbers_waits_for_its_turn(tmp_path):
    """Two keys may be listed for one client; the second serves it once the first is gone."""
    transport = Nodes(tmp_path / "nodes")
    transport.keys = {100: b"zero", 101: b"one", 102: b"two", 103: b"bad"}
    transport.configs[103] = transport.configs[102]

    def leave(order, packet):
        if order.round == 2 and order.client == 4:
            del transport.configs[102]
        return packet

    transport.change = leave
    by_flower(replace(BASE, cohort=5, rounds=3), tmp_path / "a", transport, keys=KEYS)
    assert "node 103 refused: it claims client 2, which node 102 serves" in log(tmp_path / "a")
    assert "node 103 is number 2 of 3" in log(tmp_path / "a")
    assert trained_by(transport, 103) == [("train", 3, 2, 103)]


def test_the_keys_file_that_certs_writes_is_read(tmp_path):
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
        ('[[node]]\nkey = "a"\nclient = 3\nclients = 3', "client = 3, clients = 3: expected whole numbers"),
    ],
)
def test_a_keys_file_that_cannot_be_read(tmp_path, text, says):
    pytest.importorskip("cryptography")
    (tmp_path / "nodes.toml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_keys(tmp_path / "nodes.toml")


def test_a_keys_file_that_is_missing_or_lists_a_key_twice(tmp_path):
    pytest.importorskip("cryptography")
    from fedpara.apps.flower.certificates import make_certificates

    with pytest.raises(ConfigError, match=r"none.toml cannot be read: No such file"):
        read_keys(tmp_path / "none.toml")
    make_certificates(tmp_path / "keys", ["localhost"], 1)
    key = (tmp_path / "keys" / "node-0.pub").read_text()
    (tmp_path / "twice.toml").write_text(keys_text([key, key]))
    with pytest.raises(ConfigError, match="lists a key twice"):
        read_keys(tmp_path / "twice.toml")


HOSPITAL = """
import torch
from sklearn.datasets import load_digits
from fedpara.data import Examples
digits = load_digits()
images = torch.from_numpy(digits.images * 15).to(torch.uint8)[:, None]
def load(config):
    mine = range(config.get("partition-id", 0), 1797 - config.get("fewer", 0), 4)
    if config.get("server"):
        return part([]), part(range(3, 1797, 4))
    return part(mine), None
def part(indices):
    labels = torch.from_numpy(digits.target)
    return Examples(images, labels, 10, None, (0.3,), (0.3,)).subset(list(indices))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "digit_sites.py").write_text(HOSPITAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return replace(BASE, dataset="load:digit_sites:load", clients=3, steps=20, lr=0.1, engine="flower")


def claiming(count, spoil=True):
    """Node 2 of 3 states this many examples, in its hello and in the header of its updates, which are all zeros."""

    def claim(order, packet):
        if order.kind == "hello" and packet.facts["first"] == 2:
            return Packet({**packet.facts, "examples": count})
        if order.kind == "train" and order.client == 2:
            header, state = decode(packet.body)
            zeros = {name: torch.zeros_like(tensor) if spoil else tensor for name, tensor in state.items()}
            return Packet(packet.facts, encode(zeros, replace(header, examples=count)))
        return packet

    return claim


@pytest.mark.parametrize("count", [1 << 62, (1 << 40) + 1, 0, -1])
def test_a_count_out_of_range_is_refused_by_name(tmp_path, own, count):
    """The honest two end as they do where the third is not there."""
    honest = Nodes(tmp_path / "honest")
    del honest.configs[102]
    by_flower(own, tmp_path / "a", honest)
    transport = Nodes(tmp_path / "nodes")
    transport.change = claiming(count)
    by_flower(own, tmp_path / "b", transport)
    states = [final_checkpoint(tmp_path / name).state for name in "ab"]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert read_run(tmp_path / "a").accuracy == read_run(tmp_path / "b").accuracy > 0.8
    assert f"node 102 refused: it states {count} examples: expected 1 to 1099511627776" in log(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "examples.json").read_text()) == {"0": 450, "1": 449}


def test_the_first_count_is_pinned_and_a_reply_with_another_is_refused(tmp_path, own):
    transport = Nodes(tmp_path / "nodes")
    transport.change = claiming(1 << 40)
    by_flower(replace(own, rounds=1), tmp_path / "a", transport)
    pinned = {"0": 450, "1": 449, "2": 1 << 40}
    assert json.loads((tmp_path / "a" / "examples.json").read_text()) == pinned
    assert "node 102 is number 2 of 3, with 1099511627776 examples" in log(tmp_path / "a")
    assert read_run(tmp_path / "a").metrics[0]["refused"] == []

    honest, grown = claiming(449, spoil=False), claiming(450)
    transport.change = lambda order, packet: (grown if order.kind == "train" else honest)(order, packet)
    by_flower(replace(own, rounds=1), tmp_path / "b", transport)
    assert read_run(tmp_path / "b").metrics[0]["refused"] == [
        {
            "client": 2,
            "reason": "message of 'client:2', round 1, refused: it rests on 450 examples: expected 449.",
        }
    ]


def test_a_count_that_outweighs_all_others_is_capped_and_named(tmp_path, own):
    """Zeros with 2^40 examples are the model where nothing caps them; by default one client is at most half of it."""
    honest = Nodes(tmp_path / "honest")
    del honest.configs[102]
    by_flower(replace(own, rounds=1), tmp_path / "two", honest)
    two = final_checkpoint(tmp_path / "two").state
    for name, given, share in (
        ("free", {"max_share": 1.0}, 0.0),
        ("default", {}, 1 / 2),
        ("uniform", {"weights": "uniform"}, 2 / 3),
    ):
        transport = Nodes(tmp_path / f"nodes-{name}")
        transport.change = claiming(1 << 40)
        by_flower(replace(own, rounds=1, **given), tmp_path / name, transport)
        state = final_checkpoint(tmp_path / name).state
        for key, tensor in two.items():
            torch.testing.assert_close(state[key], share * tensor, rtol=1e-2, atol=1e-4)
    said = (
        "client 2 with 1099511627776 examples counts as 899: no client has more than 50% of a round's weight"
    )
    assert said in log(tmp_path / "default")
    assert "counts as" not in log(tmp_path / "free") + log(tmp_path / "uniform")


def test_a_resumed_run_keeps_the_counts(tmp_path, own):
    """A site whose data changed is refused by name; back as they were, it takes part again."""
    transport = Nodes(tmp_path / "nodes")
    by_flower(replace(own, rounds=1), tmp_path / "a", transport)
    file = tmp_path / "a" / "examples.json"
    before = file.read_bytes()
    transport.configs[102]["fewer"] = 800
    resume(tmp_path / "a", rounds=2, engine="flower", host=host(transport))
    assert "node 102 refused: it states 249 examples for client 2, which began this run with 449" in log(
        tmp_path / "a"
    )
    del transport.configs[102]["fewer"]
    resume(tmp_path / "a", rounds=3, engine="flower", host=host(transport))
    assert [line["clients"] for line in read_run(tmp_path / "a").metrics] == [3, 2, 3]
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"a": 3}', b'{"0": 0}', b'{"0": true}', b'{"0": 1099511627777}']
)
def test_counts_that_cannot_be_read_stop_the_run(tmp_path, own, content):
    transport = Nodes(tmp_path / "nodes")
    by_flower(replace(own, rounds=1), tmp_path / "a", transport)
    (tmp_path / "a" / "examples.json").write_bytes(content)
    with pytest.raises(RunError, match=r"examples.json cannot be read .*Restore the file, or delete it"):
        resume(tmp_path / "a", rounds=2, engine="flower", host=host(transport))


def test_a_site_without_examples_is_refused(tmp_path, own):
    transport = Nodes(tmp_path / "nodes")
    transport.configs[102]["fewer"] = 1797
    by_flower(replace(own, rounds=1), tmp_path / "a", transport)
    assert "node 102 refused: its data set holds no training examples" in log(tmp_path / "a")


def test_a_run_on_a_known_split_has_no_counts_file(tmp_path):
    by_flower(replace(BASE, rounds=1), tmp_path / "a")
    assert not (tmp_path / "a" / "examples.json").exists()


def test_folders_above_a_nodes_memory_are_for_their_owner_only(tmp_path):
    by_flower(replace(BASE, rounds=1, **CASES["scaffold"]), tmp_path / "a", Nodes(tmp_path / "new" / "nodes"))
    made = [path for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")) if path.is_dir()]
    assert {path.name for path in made} > {"new", "nodes", "node-0"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


def test_waiting_for_a_displaced_node_costs_no_deadline(tmp_path):
    """A refused claim is settled before the round: nobody waits for the attacker."""
    transport = Attacked(tmp_path / "nodes", attacker=999)
    by_flower(BASE, tmp_path / "a", transport, policy=Policy(deadline=100, wait=5))
    assert transport.now == 0
