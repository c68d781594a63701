"""Bad, late and lost responses: the round goes on, and the log says which client and why."""

from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, CASES, Nodes, host, log, run_on_nodes

from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Packet, Request, Response, from_packet, to_packet
from fedpara.engines.progress import Schedule
from fedpara.errors import ConfigError, WireError
from fedpara.experiments import read_run
from fedpara.experiments.run import lay_out, resume
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.tasks import Score
from fedpara.wire import decode, encode


def spoilt(change):
    def spoil(request, packet):
        if request.kind == "hello" or request.client != 1:
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
    "round": (spoilt(recoded(dict, round=7)), "its round is 7: expected 2"),
    "stale": (spoilt(lambda a: replace(a, round=1)), "client 1 in round 1: expected client 1 in round 2"),
    "name": (spoilt(lambda a: replace(a, client=3)), "for client 3 in round 2"),
    "forged": (spoilt(recoded(dict, sender="client:3")), "names client:3 as its sender"),
    "scheme": (spoilt(recoded(dict, scheme="dense")), "its scheme is 'dense'"),
    "cut": (spoilt(lambda a: replace(a, message=a.message[:-9])), "does not match its digest"),
    "noise": (spoilt(lambda a: replace(a, message=bytes(1000))), "expected b'FPM1'"),
    "junk": (
        spoilt(lambda a: replace(a, message=bytes(1 << 30))),
        "a message of 1073741824 bytes: expected at most",
    ),
    "nothing": (spoilt(lambda a: Response(a.client, a.round)), "is empty"),
    "facts": (
        lambda request, packet: Packet({"client": "one"}) if request.client == 1 else packet,
        "client is 'one'",
    ),
    "scores": (
        spoilt(lambda a: replace(a, before=Score(3, {"accuracy": 3.0, "loss": 0.0}))),
        "an accuracy of 3.0",
    ),
    "error": (lambda request, packet: "node gone" if request.client == 1 else packet, "node gone"),
    "silence": (lambda request, packet: None if request.client == 1 else packet, "no reply within 100 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_response_is_rejected_and_the_round_goes_on(tmp_path, fault):
    change, says = FAULTS[fault]
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = lambda request, packet: change(request, packet) if request.round == 2 else packet
    run_on_nodes(replace(BASE, cohort=5), tmp_path / "a", transport)
    (refused,) = read_run(tmp_path / "a").metrics[1]["refused"]
    assert refused["client"] == 1
    assert says in refused["reason"]
    assert f"round 2: client 1 refused: {refused['reason']}" in log(tmp_path / "a")
    assert read_run(tmp_path / "a").metrics[2]["clients"] == 5
    state = final_checkpoint(tmp_path / "a").state
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_a_late_response_is_rejected_and_logged(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    delays = {(1, 2): 101.0, (2, 0): 5.0}
    transport.delay = lambda request: delays.get((request.round, request.client), 0.0)
    run_on_nodes(replace(BASE, cohort=5), tmp_path / "a", transport)
    assert read_run(tmp_path / "a").metrics[0]["refused"] == [
        {"client": 2, "reason": "no reply within 100 s"}
    ]
    assert read_run(tmp_path / "a").metrics[1]["refused"] == []
    assert "round 3: client 2's reply to round 1 came too late and is refused" in log(tmp_path / "a")
    up = [line["up"] for line in read_run(tmp_path / "a").metrics]
    assert up[0] == up[1] / 5 * 4  # five clients' messages are of one size
    assert up[2] == up[1] / 5 * 6, "a late message counts as sent"


def test_oversampling_does_not_wait_for_the_slowest(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.delay = lambda request: 50.0 if request.kind == "train" and request.client == 2 else 0.0
    run_on_nodes(
        replace(BASE, cohort=4), tmp_path / "a", transport, policy=Policy(deadline=100, wait=5, oversample=1)
    )
    assert transport.now < 50
    for line in read_run(tmp_path / "a").metrics:
        assert line["clients"] == 4
        assert line["refused"] == [{"client": 2, "reason": "the round had enough replies without it"}]


@pytest.mark.parametrize("case", ["fedavg", "scaffold"])
def test_too_few_valid_replies_keep_the_model(tmp_path, case):
    experiment = replace(BASE, rounds=2, cohort=5, **CASES[case])
    transport = Nodes(tmp_path / "nodes")
    transport.change = lambda request, packet: "lost" if request.round == 2 and request.client > 1 else packet
    run_on_nodes(experiment, tmp_path / "a", transport, policy=Policy(deadline=100, wait=5, minimum=3))
    run_on_nodes(replace(experiment, rounds=1), tmp_path / "b")
    assert "round 2 had 2 of 3 usable updates: the model stays unchanged" in log(tmp_path / "a")
    states = [final_checkpoint(tmp_path / name).state for name in "ab"]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"deadline": 0}, "deadline is 0"),
        ({"minimum": 4}, "min_replies is 4"),
        ({"oversample": 3}, "oversample is 3"),
        ({"wait": -1}, "wait is -1"),
    ],
)
def test_policies_that_do_not_fit_the_experiment(tmp_path, policy, says):
    lay_out(BASE, tmp_path / "a")
    with pytest.raises(ConfigError, match=says):
        resume(
            tmp_path / "a",
            engine="flower",
            host=host(Nodes(tmp_path), policy=Policy(**{"wait": 5, **policy})),
        )


def test_a_loss_too_large_for_a_float_is_rejected():
    with pytest.raises(WireError, match=r"loss is .*: expected float"):
        from_packet(Packet({"client": 1, "round": 1, "reason": "", "loss": 10**400}), Response, 10)


def test_a_round_needs_at_least_one_reply():
    with pytest.raises(ConfigError, match="min_replies is 0: expected 1 to the cohort of 3"):
        Policy(minimum=0).schedule(Schedule(1, 5, 3, lambda client: 1))


def test_an_unsent_request_is_not_counted(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    sent = transport.send

    def send(packets, seconds):
        requests = [from_packet(packet, Request, 1 << 30) for _, packet in packets]
        lost = [
            request.kind == "train" and request.round == 2 and request.client == 1 for request in requests
        ]
        return ["" if gone else name for name, gone in zip(sent(packets, seconds), lost, strict=True)]

    transport.send = send
    run_on_nodes(replace(BASE, rounds=2, cohort=5), tmp_path / "a", transport)
    first, second = read_run(tmp_path / "a").metrics
    (refused,) = second["refused"]
    assert (refused["client"], "could not be sent" in refused["reason"]) == (1, True)
    assert second["down"] == first["down"] * 4 // 5


def test_oversampling_waits_for_enough_valid_replies(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = lambda request, packet: "node gone" if request.client == 1 else packet
    transport.delay = lambda request: 5.0 if request.kind == "train" and request.client == 2 else 0.0
    policy = Policy(deadline=100, wait=5, oversample=1)
    run_on_nodes(replace(BASE, rounds=1, cohort=4), tmp_path / "a", transport, policy=policy)
    (line,) = read_run(tmp_path / "a").metrics
    assert line["refused"] == [{"client": 1, "reason": "node gone"}]


def test_a_late_unreadable_response_counts_as_sent(tmp_path):
    transport = Nodes(tmp_path / "nodes", count=5)
    late = lambda request: (request.round, request.client) == (1, 2)  # noqa: E731
    transport.delay = lambda request: 101.0 if late(request) else 5.0 if request.round == 2 else 0.0
    transport.change = lambda request, packet: (
        replace(packet, body=bytes(10_000_000)) if late(request) else packet
    )
    run_on_nodes(replace(BASE, cohort=5), tmp_path / "a", transport)
    up = [line["up"] for line in read_run(tmp_path / "a").metrics]
    assert up[2] == up[1] + 10_000_000
