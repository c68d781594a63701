"""What a node says is a stranger's word: it fills no log, sets no score that was not asked for, and is counted."""

from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, Nodes, by_flower, log

from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Hello, Response, from_packet, to_packet
from fedpara.engines.local.worker import Score
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import read_run
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.wire import decode, encode

FORGED = "x\n2026-01-01T00:00:00Z round 1: client 0 refused: forged\x1b[2J\x07" + "y" * 60_000
ONE = replace(BASE, rounds=1)


def spoilt(change):
    """Client 1's answers, changed."""

    def spoil(order, packet):
        if order.kind == "hello" or order.client != 1:
            return packet
        return change(from_packet(packet, Response, 1 << 30))

    return spoil


def disturbed(tmp_path, change, experiment=ONE):
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = change
    by_flower(replace(experiment, cohort=5), tmp_path / "a", transport)
    return read_run(tmp_path / "a").metrics


@pytest.mark.parametrize(
    "change",
    [spoilt(lambda a: to_packet(replace(a, message=b"", reason=FORGED))), spoilt(lambda a: FORGED * 50)],
    ids=["reason", "error"],
)
def test_a_reason_is_one_short_line(tmp_path, change):
    (metrics,) = disturbed(tmp_path, change)
    said = log(tmp_path / "a")
    assert len(metrics["refused"][0]["reason"]) < 1000
    assert len(said) < 5000
    assert not [line for line in said.splitlines() if line.startswith("2026-01-01")]
    assert all(c.isprintable() or c == "\n" for c in said)


@pytest.mark.parametrize("field", ["version", "reason", "scheme"])
def test_so_is_what_a_hello_says(tmp_path, field):
    def spoil(order, packet):
        if order.kind != "hello":
            return packet
        return to_packet(replace(from_packet(packet, Hello, 0), **{field: FORGED}))

    with pytest.raises(RunError, match="was refused") as found:
        disturbed(tmp_path, spoil)
    for text in (str(found.value), log(tmp_path / "a")):
        assert len(text) < 10_000
        assert all(c.isprintable() or c == "\n" for c in text)
    assert "\n2026-01-01" not in log(tmp_path / "a")


def test_a_score_that_was_not_asked_for_is_none(tmp_path):
    perfect = spoilt(lambda a: to_packet(replace(a, before=Score(1, 1, 0.0), after=Score(1, 1, 0.0))))
    (metrics,) = disturbed(tmp_path, perfect, replace(ONE, scheme="pfedpara"))
    assert (metrics["accuracy"], metrics["before"], metrics["after"]) == (None, None, None)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_refused(tmp_path, loss):
    (metrics,) = disturbed(tmp_path, spoilt(lambda a: to_packet(replace(a, loss=loss))))
    assert [one["client"] for one in metrics["refused"]] == [1]
    assert "its loss is" in metrics["refused"][0]["reason"]
    assert metrics["train_loss"] is not None


def test_bytes_are_those_that_were_sent_and_those_that_came(tmp_path):
    (fair,) = disturbed(tmp_path / "fair", lambda order, packet: packet)
    large = spoilt(lambda a: to_packet(replace(a, message=bytes(10_000_000))))
    (oversize,) = disturbed(tmp_path / "oversize", large)
    assert oversize["up"] == fair["up"] * 4 // 5 + 10_000_000
    transport = Nodes(tmp_path / "four", count=5)
    del transport.configs[101]
    by_flower(replace(ONE, cohort=5), tmp_path / "b", transport)
    (without,) = read_run(tmp_path / "b").metrics
    assert [one["client"] for one in without["refused"]] == [1]
    assert without["down"] == fair["down"] * 4 // 5
    assert without["up"] == fair["up"] * 4 // 5


@pytest.mark.parametrize(
    ("algorithm", "value"), [("feddyn", 3.4e38), ("fedadam", 1e20), ("fedyogi", 1e20), ("fedadagrad", 1e20)]
)
def test_finite_updates_whose_aggregate_is_not_are_not_saved(tmp_path, algorithm, value):
    """The run stops at that round, and goes on from the one before when the node is gone."""

    def vast(order, packet):
        if order.kind == "hello" or order.client == 0 or order.round != 2:
            return packet
        answer = from_packet(packet, Response, 1 << 30)
        header, state = decode(answer.message)
        huge = {n: torch.full_like(t, value) if t.is_floating_point() else t for n, t in state.items()}
        return to_packet(replace(answer, message=encode(huge, header)))

    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = vast
    experiment = replace(BASE, algorithm=algorithm, cohort=5)
    with pytest.raises(
        RunError, match=r"round 2: the aggregated model.*The state before it is kept.*max_norm"
    ):
        by_flower(experiment, tmp_path / "a", transport)
    assert len(read_run(tmp_path / "a").metrics) == 1
    assert all(tensor.isfinite().all() for tensor in final_checkpoint(tmp_path / "a").state.values())
    transport.change = lambda order, packet: packet
    by_flower(experiment, tmp_path / "a", transport)
    assert len(read_run(tmp_path / "a").metrics) == 3


@pytest.mark.parametrize(
    "policy",
    [
        {"deadline": 2e10},
        {"deadline": float("nan")},
        {"wait": float("nan")},
        {"wait": float("inf")},
        {"minimum": 1.9},
        {"oversample": float("inf")},
        {"threads": True},
    ],
    ids=str,
)
def test_terms_that_no_clock_and_no_count_has(policy):
    with pytest.raises(ConfigError, match=r"expected a (number of seconds|whole number)"):
        Policy(**policy)
