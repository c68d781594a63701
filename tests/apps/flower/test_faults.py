"""Bad answers, late answers, nodes that do not fit: the round goes on, and the log says who and why."""

import time
from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, CASES, Nodes, by_flower, host, log

import fedpara
from fedpara.apps.flower import node as flower_node
from fedpara.apps.flower.node import answer
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Hello, Packet, Request, Response, from_packet, to_packet
from fedpara.engines.progress import Schedule
from fedpara.errors import ConfigError, RunError, WireError
from fedpara.experiments import read_run, run
from fedpara.experiments.config import to_toml
from fedpara.experiments.run import lay_out, resume
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.wire import decode, encode


def spoilt(change):
    def spoil(order, packet):
        if order.kind == "hello" or order.client != 1:
            return packet
        given = from_packet(packet, Response, 1 << 30)
        return to_packet(change(given))

    return spoil


def recoded(change, **header):
    def spoil(given):
        said, state = decode(given.message)
        return replace(given, message=encode(change(state), replace(said, **header)))

    return spoil


FAULTS = {
    "nan": (spoilt(recoded(lambda s: {n: t * torch.nan for n, t in s.items()})), "holds NaN or infinity"),
    "names": (spoilt(recoded(lambda s: {f"{n}s": t for n, t in s.items()})), "it lacks"),
    "one-more": (spoilt(recoded(lambda s: {**s, "extra": torch.ones(2)})), "also holds 'extra'"),
    "shape": (spoilt(recoded(lambda s: {n: t[..., :1].clone() for n, t in s.items()})), "has shape"),
    "round": (spoilt(recoded(dict, round=7)), "it is of round 7: expected 2"),
    "stale": (spoilt(lambda a: replace(a, round=1)), "client 1 in round 1: expected client 1 in round 2"),
    "name": (spoilt(lambda a: replace(a, client=3)), "for client 3 in round 2"),
    "forged": (spoilt(recoded(dict, sender="client:3")), "in the name of client 1"),
    "scheme": (spoilt(recoded(dict, scheme="dense")), "it is of scheme 'dense'"),
    "cut": (spoilt(lambda a: replace(a, message=a.message[:-9])), "does not match its digest"),
    "noise": (spoilt(lambda a: replace(a, message=bytes(1000))), "expected b'FPM1'"),
    "junk": (
        spoilt(lambda a: replace(a, message=bytes(1 << 30))),
        "a message of 1073741824 bytes: expected at most",
    ),
    "nothing": (spoilt(lambda a: Response(a.client, a.round)), "its answer is empty"),
    "facts": (
        lambda order, packet: Packet({"client": "one"}) if order.client == 1 else packet,
        "client is 'one'",
    ),
    "scores": (
        spoilt(lambda a: replace(a, before=fedpara.engines.local.worker.Score(9, 3, 0.0))),
        "9 right of 3",
    ),
    "error": (lambda order, packet: "node gone" if order.client == 1 else packet, "node gone"),
    "silence": (lambda order, packet: None if order.client == 1 else packet, "no reply within 100 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_answer_is_refused_by_name_and_the_round_goes_on(tmp_path, fault):
    change, says = FAULTS[fault]
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = lambda order, packet: change(order, packet) if order.round == 2 else packet
    by_flower(replace(BASE, cohort=5), tmp_path / "a", transport)
    (refused,) = read_run(tmp_path / "a").metrics[1]["refused"]
    assert refused["client"] == 1
    assert says in refused["reason"]
    assert f"round 2: client 1 refused: {refused['reason']}" in log(tmp_path / "a")
    assert read_run(tmp_path / "a").metrics[2]["clients"] == 5
    state = final_checkpoint(tmp_path / "a").state
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_a_late_answer_is_refused_and_named(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    delays = {(1, 2): 101.0, (2, 0): 5.0}
    transport.delay = lambda order: delays.get((order.round, order.client), 0.0)
    by_flower(replace(BASE, cohort=5), tmp_path / "a", transport)
    assert read_run(tmp_path / "a").metrics[0]["refused"] == [
        {"client": 2, "reason": "no reply within 100 s"}
    ]
    assert read_run(tmp_path / "a").metrics[1]["refused"] == []
    assert "round 3: client 2's reply of round 1 came too late and is refused" in log(tmp_path / "a")
    up = [line["up"] for line in read_run(tmp_path / "a").metrics]
    assert up[0] == up[1] / 5 * 4  # five clients' messages are of one size
    assert up[2] == up[1] / 5 * 6, "what came late was sent as well"


def test_over_sampling_does_not_wait_for_the_slowest(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.delay = lambda order: 50.0 if order.kind == "train" and order.client == 2 else 0.0
    by_flower(
        replace(BASE, cohort=4), tmp_path / "a", transport, policy=Policy(deadline=100, wait=5, oversample=1)
    )
    assert transport.now < 50
    for line in read_run(tmp_path / "a").metrics:
        assert line["clients"] == 4
        assert line["refused"] == [{"client": 2, "reason": "the round had enough replies without it"}]


@pytest.mark.parametrize("case", ["fedavg", "scaffold"])
def test_too_few_good_replies_keep_the_model(tmp_path, case):
    experiment = replace(BASE, rounds=2, cohort=5, **CASES[case])
    transport = Nodes(tmp_path / "nodes")
    transport.change = lambda order, packet: "lost" if order.round == 2 and order.client > 1 else packet
    by_flower(experiment, tmp_path / "a", transport, policy=Policy(deadline=100, wait=5, minimum=3))
    by_flower(replace(experiment, rounds=1), tmp_path / "b")
    assert "round 2 had 2 of 3 usable updates: the model is kept as it was" in log(tmp_path / "a")
    states = [final_checkpoint(tmp_path / name).state for name in "ab"]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


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
def test_a_node_that_does_not_fit_is_refused_by_name_before_any_training(tmp_path, case):
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
    by_flower(replace(BASE, cohort=5), tmp_path / "a", transport)
    assert f"node {mine} refused: {says}" in log(tmp_path / "a")
    assert not [asked for asked in transport.asked if asked[0] == "train" and asked[3] == mine]
    for line in read_run(tmp_path / "a").metrics:
        assert [entry["client"] for entry in line["refused"]] == [1, 4]
        assert all("no node serves it" in entry["reason"] for entry in line["refused"])


def test_a_round_without_nodes_is_no_round(tmp_path):
    """None fits, or none is there: the run stops where it is, and goes on once they are."""
    transport = Nodes(tmp_path / "nodes")
    with pytest.raises(RunError, match=r"it runs fedpara 0.1.0, the server 9.9: install the same"):
        by_flower(BASE, tmp_path / "a", transport, version="9.9")
    there, transport.configs = transport.configs, {}
    with pytest.raises(
        RunError, match=r"0 of the round's 3 clients have a node after 5 s; the policy needs 1\."
    ):
        by_flower(BASE, tmp_path / "a", transport)
    assert read_run(tmp_path / "a").rounds == 0
    transport.configs = there
    by_flower(BASE, tmp_path / "a", transport)
    assert read_run(tmp_path / "a").rounds == 3


def test_a_node_may_leave_and_another_come(tmp_path):
    transport = Nodes(tmp_path / "nodes")
    gone, late = 102, {}

    def leave(order, packet):
        if order.round == 1 and gone in transport.configs and order.client == 4:
            late["config"] = transport.configs.pop(gone)
        if order.round == 2 and order.client == 4:
            transport.configs[999] = late["config"]
        return packet

    transport.change = leave
    by_flower(replace(BASE, cohort=5, **CASES["scaffold"]), tmp_path / "a", transport)
    clients = [line["clients"] for line in read_run(tmp_path / "a").metrics]
    assert clients == [5, 4, 5]
    assert [entry["client"] for entry in read_run(tmp_path / "a").metrics[1]["refused"]] == [2]


def test_a_client_that_hangs_does_not_hold_its_node(tmp_path, monkeypatch):
    real = flower_node.train

    def slow(order, config):
        if order.client == 1:
            time.sleep(3)
        return real(order, config)

    monkeypatch.setattr(flower_node, "train", slow)
    by_flower(replace(BASE, rounds=1, cohort=5), tmp_path / "a", policy=Policy(deadline=1, wait=5))
    (refused,) = read_run(tmp_path / "a").metrics[0]["refused"]
    assert refused == {"client": 1, "reason": "it did not finish within 0.9 s"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "does not say which clients it serves"),
        ({"partition-id": 3, "num-partitions": 3}, "partition-id=3 num-partitions=3"),
        ({"partition-id": "a", "num-partitions": 3}, "partition-id='a'"),
        ({"client": 0}, "client=0 clients=None"),
    ],
)
def test_a_node_must_say_whom_it_serves(config, says):
    order = Request("hello", to_toml(BASE), fedpara.__version__, "0", 10.0)
    assert says in from_packet(answer(to_packet(order), config), Hello, 0).reason


@pytest.mark.parametrize("seconds", [1e10, float("nan"), -1.0])
def test_a_node_answers_an_order_whose_seconds_mean_nothing(seconds):
    order = Request("hello", to_toml(BASE), fedpara.__version__, "0", seconds)
    given = from_packet(answer(to_packet(order), {"partition-id": 0, "num-partitions": 3}), Hello, 0)
    assert given.reason.startswith(f"the order grants {seconds:g} s: expected above 0, at most ")


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


def test_a_nodes_own_data(tmp_path, monkeypatch):
    (tmp_path / "hospital.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = replace(BASE, dataset="load:hospital:load", clients=3, engine="flower")
    transport = Nodes(tmp_path / "nodes")
    transport.configs[102]["site"] = "broken"
    by_flower(experiment, tmp_path / "a", transport)
    assert [line["clients"] for line in read_run(tmp_path / "a").metrics] == [2, 2, 2]
    assert "node 102 refused: load:hospital:load failed: OSError: the disk is gone" in log(tmp_path / "a")
    assert read_run(tmp_path / "a").accuracy is not None
    with pytest.raises(ConfigError, match="use --engine flower"):
        lay_out(replace(experiment, engine="sequential"), tmp_path / "b")


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"deadline": 0}, "deadline is 0"),
        ({"minimum": 4}, "min_replies is 4"),
        ({"oversample": 3}, "oversample is 3"),
        ({"wait": -1}, "wait is -1"),
    ],
)
def test_terms_that_cannot_be_kept(tmp_path, policy, says):
    lay_out(BASE, tmp_path / "a")
    with pytest.raises(ConfigError, match=says):
        resume(
            tmp_path / "a",
            engine="flower",
            host=host(Nodes(tmp_path), policy=Policy(**{"wait": 5, **policy})),
        )


def test_flower_cannot_be_called_from_here(tmp_path):
    """Flower starts the server, not the other way round; a mistake leaves nothing behind."""
    with pytest.raises(ConfigError, match="fedpara run --engine flower"):
        run(replace(BASE, engine="flower"), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    lay_out(BASE, tmp_path / "b")
    with pytest.raises(ConfigError, match="fedpara run --engine flower"):
        resume(tmp_path / "b", engine="flower")
    assert read_run(tmp_path / "b").experiment.engine == "auto"


def test_a_number_too_large_for_a_float_is_no_loss():
    with pytest.raises(WireError, match=r"loss is .*: expected float"):
        from_packet(Packet({"client": 1, "round": 1, "reason": "", "loss": 10**400}), Response, 10)


def test_a_round_needs_at_least_one_reply():
    with pytest.raises(ConfigError, match="min_replies is 0: expected 1 to the cohort of 3"):
        Policy(minimum=0).schedule(Schedule(1, 5, 3, lambda client: 1))


def test_what_could_not_be_sent_is_not_counted(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    sent = transport.send

    def send(packets, seconds):
        orders = [from_packet(packet, Request, 1 << 30) for _, packet in packets]
        lost = [order.kind == "train" and order.round == 2 and order.client == 1 for order in orders]
        return ["" if gone else name for name, gone in zip(sent(packets, seconds), lost, strict=True)]

    transport.send = send
    by_flower(replace(BASE, rounds=2, cohort=5), tmp_path / "a", transport)
    first, second = read_run(tmp_path / "a").metrics
    assert second["refused"] == [{"client": 1, "reason": "its order could not be sent"}]
    assert second["down"] == first["down"] * 4 // 5


def test_over_sampling_waits_for_enough_good_replies(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = lambda order, packet: "node gone" if order.client == 1 else packet
    transport.delay = lambda order: 5.0 if order.kind == "train" and order.client == 2 else 0.0
    policy = Policy(deadline=100, wait=5, oversample=1)
    by_flower(replace(BASE, rounds=1, cohort=4), tmp_path / "a", transport, policy=policy)
    (line,) = read_run(tmp_path / "a").metrics
    assert line["refused"] == [{"client": 1, "reason": "node gone"}]


def test_nodes_are_given_time_to_appear_by_whatever_clock(tmp_path):
    """A node that is two seconds late takes part in the first round: `wait` counts from its start."""
    transport = Nodes(tmp_path / "nodes")
    transport.now, late = 1000.0, transport.configs.pop(102)

    def sleep(seconds):
        transport.now += seconds
        if transport.now >= 1002:
            transport.configs[102] = late

    transport.sleep = sleep
    by_flower(replace(BASE, rounds=1, cohort=5), tmp_path / "a", transport)
    assert read_run(tmp_path / "a").metrics[0]["clients"] == 5


def test_a_node_whose_hello_was_lost_is_asked_again(tmp_path):
    transport, hellos = Nodes(tmp_path / "nodes"), []

    def lose_the_first(order, packet):
        hellos.append(order.kind)
        return None if hellos == ["hello"] else packet

    transport.change = lose_the_first
    policy = Policy(deadline=100, wait=5, hello=1)
    by_flower(replace(BASE, rounds=1, cohort=5), tmp_path / "a", transport, policy=policy)
    assert hellos.count("hello") == 4
    assert read_run(tmp_path / "a").metrics[0]["clients"] == 5


def test_a_refused_node_is_asked_once_a_round(tmp_path):
    transport = Nodes(tmp_path / "nodes")
    transport.configs[102]["num-partitions"] = 0
    by_flower(replace(BASE, rounds=2, cohort=5), tmp_path / "a", transport)
    assert [line["clients"] for line in read_run(tmp_path / "a").metrics] == [4, 4]
    assert len([node for kind, _, _, node in transport.asked if kind == "hello" and node == 102]) == 2


def test_a_late_answer_that_cannot_be_read_was_sent_as_well(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    late = lambda order: (order.round, order.client) == (1, 2)  # noqa: E731
    transport.delay = lambda order: 101.0 if late(order) else 5.0 if order.round == 2 else 0.0
    transport.change = lambda order, packet: (
        replace(packet, body=bytes(10_000_000)) if late(order) else packet
    )
    by_flower(replace(BASE, cohort=5), tmp_path / "a", transport)
    up = [line["up"] for line in read_run(tmp_path / "a").metrics]
    assert up[2] == up[1] + 10_000_000


@pytest.mark.parametrize(("first", "every"), [(0, 0), (3, 3)])
def test_a_node_of_no_nodes_is_refused(tmp_path, first, every):
    """client % 0 would end the server."""
    transport = Nodes(tmp_path / "nodes")

    def spoil(order, packet):
        hello = order.kind == "hello" and packet.facts["first"] == 1
        return Packet({**packet.facts, "first": first, "every": every}) if hello else packet

    transport.change = spoil
    by_flower(replace(BASE, rounds=1, cohort=5), tmp_path / "a", transport)
    assert f"node 101 refused: it is number {first} of {every}: expected" in log(tmp_path / "a")
