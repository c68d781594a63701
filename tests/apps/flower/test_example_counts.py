"""How many examples a node with its own data states: bounded, fixed at the first hello, and capped in weight."""

import json
from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, Nodes, host, log, run_on_nodes

from fedpara.engines.flower.rpc import Packet
from fedpara.errors import RunError
from fedpara.experiments import read_run
from fedpara.experiments.run import resume
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.wire import decode, encode

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
    """Node 2 of 3 states `count` examples in its hello and its updates; with `spoil`, the updates are zeros."""

    def change(request, packet):
        if request.kind == "hello" and packet.facts["first"] == 2:
            return Packet({**packet.facts, "examples": count})
        if request.kind == "train" and request.client == 2:
            header, state = decode(packet.body)
            zeros = {name: torch.zeros_like(tensor) if spoil else tensor for name, tensor in state.items()}
            return Packet(packet.facts, encode(zeros, replace(header, examples=count)))
        return packet

    return change


@pytest.mark.parametrize("count", [1 << 62, (1 << 40) + 1, 0, -1])
def test_a_count_out_of_range_is_rejected(tmp_path, own, count):
    """The result of the two honest nodes is the same as without the third."""
    honest = Nodes(tmp_path / "honest")
    del honest.configs[102]
    run_on_nodes(own, tmp_path / "a", honest)
    transport = Nodes(tmp_path / "nodes")
    transport.change = claiming(count)
    run_on_nodes(own, tmp_path / "b", transport)
    states = [final_checkpoint(tmp_path / name).state for name in "ab"]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert read_run(tmp_path / "a").accuracy == read_run(tmp_path / "b").accuracy > 0.8
    assert f"node 102 refused: it states {count} examples: expected 1 to 1099511627776" in log(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "examples.json").read_text()) == {"0": 450, "1": 449}


def test_the_first_count_is_fixed_and_a_reply_with_another_is_rejected(tmp_path, own):
    transport = Nodes(tmp_path / "nodes")
    transport.change = claiming(1 << 40)
    run_on_nodes(replace(own, rounds=1), tmp_path / "a", transport)
    pinned = {"0": 450, "1": 449, "2": 1 << 40}
    assert json.loads((tmp_path / "a" / "examples.json").read_text()) == pinned
    assert "node 102 is number 2 of 3, with 1099511627776 examples" in log(tmp_path / "a")
    assert read_run(tmp_path / "a").metrics[0]["refused"] == []

    honest, grown = claiming(449, spoil=False), claiming(450)
    transport.change = lambda request, packet: (grown if request.kind == "train" else honest)(request, packet)
    run_on_nodes(replace(own, rounds=1), tmp_path / "b", transport)
    assert read_run(tmp_path / "b").metrics[0]["refused"] == [
        {
            "client": 2,
            "reason": "message of 'client:2', round 1, refused: it claims 450 examples: expected 449.",
        }
    ]


def test_a_huge_count_is_capped_and_logged(tmp_path, own):
    """Zeros with 2^40 examples become the model without a cap; by default a client has at most half the weight."""
    honest = Nodes(tmp_path / "honest")
    del honest.configs[102]
    run_on_nodes(replace(own, rounds=1), tmp_path / "two", honest)
    two = final_checkpoint(tmp_path / "two").state
    for name, given, share in (
        ("free", {"max_share": 1.0}, 0.0),
        ("default", {}, 1 / 2),
        ("uniform", {"weights": "uniform"}, 2 / 3),
    ):
        transport = Nodes(tmp_path / f"nodes-{name}")
        transport.change = claiming(1 << 40)
        run_on_nodes(replace(own, rounds=1, **given), tmp_path / name, transport)
        state = final_checkpoint(tmp_path / name).state
        for key, tensor in two.items():
            torch.testing.assert_close(state[key], share * tensor, rtol=1e-2, atol=1e-4)
    message = "client 2 with 1099511627776 examples counts as 899: max_share limits each client to 50%"
    assert message in log(tmp_path / "default")
    assert "counts as" not in log(tmp_path / "free") + log(tmp_path / "uniform")


def test_a_resumed_run_keeps_the_counts(tmp_path, own):
    """A site whose data changed is rejected; once restored, it takes part again."""
    transport = Nodes(tmp_path / "nodes")
    run_on_nodes(replace(own, rounds=1), tmp_path / "a", transport)
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
def test_a_damaged_counts_file_stops_the_run(tmp_path, own, content):
    transport = Nodes(tmp_path / "nodes")
    run_on_nodes(replace(own, rounds=1), tmp_path / "a", transport)
    (tmp_path / "a" / "examples.json").write_bytes(content)
    with pytest.raises(RunError, match=r"examples.json cannot be read .*Restore the file, or delete it"):
        resume(tmp_path / "a", rounds=2, engine="flower", host=host(transport))


def test_a_site_without_examples_is_rejected(tmp_path, own):
    transport = Nodes(tmp_path / "nodes")
    transport.configs[102]["fewer"] = 1797
    run_on_nodes(replace(own, rounds=1), tmp_path / "a", transport)
    assert "node 102 refused: its data set holds no training examples" in log(tmp_path / "a")


def test_a_run_on_a_library_data_set_has_no_counts_file(tmp_path):
    run_on_nodes(replace(BASE, rounds=1), tmp_path / "a")
    assert not (tmp_path / "a" / "examples.json").exists()


def test_a_node_with_its_own_data_is_one_client(tmp_path, own):
    """Two clients of one node would train on the same examples, and a cohort's epsilon would be too small."""
    more = replace(own, clients=6)
    says = "which is one client, and would serve 2: set clients to the number of nodes"
    with pytest.raises(RunError, match=says):
        run_on_nodes(more, tmp_path / "a", Nodes(tmp_path / "nodes"))
