"""Nodes are not trusted: they cannot flood the log, set scores that were not requested, or hide sent bytes."""

from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, Nodes, log, run_on_nodes

from fedpara.engines.flower.rpc import Hello, Response, from_packet, to_packet
from fedpara.errors import RunError
from fedpara.experiments import read_run
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.tasks import Score
from fedpara.wire import decode, encode

FORGED = "x\n2026-01-01T00:00:00Z round 1: client 0 refused: forged\x1b[2J\x07" + "y" * 60_000
ONE = replace(BASE, rounds=1)


def spoilt(change):
    """Alter client 1's responses."""

    def spoil(request, packet):
        if request.kind == "hello" or request.client != 1:
            return packet
        return change(from_packet(packet, Response, 1 << 30))

    return spoil


def disturbed(tmp_path, change, experiment=ONE):
    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = change
    run_on_nodes(replace(experiment, cohort=5), tmp_path / "a", transport)
    return read_run(tmp_path / "a").metrics


@pytest.mark.parametrize(
    "change",
    [spoilt(lambda a: to_packet(replace(a, message=b"", reason=FORGED))), spoilt(lambda a: FORGED * 50)],
    ids=["reason", "error"],
)
def test_a_reason_is_a_single_short_line(tmp_path, change):
    (metrics,) = disturbed(tmp_path, change)
    said = log(tmp_path / "a")
    assert len(metrics["refused"][0]["reason"]) < 1000
    assert len(said) < 5000
    assert not [line for line in said.splitlines() if line.startswith("2026-01-01")]
    assert all(c.isprintable() or c == "\n" for c in said)


@pytest.mark.parametrize("field", ["version", "reason", "scheme"])
def test_the_texts_of_a_hello_are_short_lines(tmp_path, field):
    def spoil(request, packet):
        if request.kind != "hello":
            return packet
        return to_packet(replace(from_packet(packet, Hello, 0), **{field: FORGED}))

    with pytest.raises(RunError, match="was refused") as found:
        disturbed(tmp_path, spoil)
    for text in (str(found.value), log(tmp_path / "a")):
        assert len(text) < 10_000
        assert all(c.isprintable() or c == "\n" for c in text)
    assert "\n2026-01-01" not in log(tmp_path / "a")


PERFECT = Score(1, {"accuracy": 1.0, "loss": 0.0})


def test_a_score_that_was_not_requested_is_ignored(tmp_path):
    perfect = spoilt(lambda a: to_packet(replace(a, before=PERFECT, after=PERFECT)))
    (metrics,) = disturbed(tmp_path, perfect, replace(ONE, scheme="pfedpara"))
    assert (metrics["accuracy"], metrics["before"], metrics["after"]) == (None, None, None)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_rejected(tmp_path, loss):
    (metrics,) = disturbed(tmp_path, spoilt(lambda a: to_packet(replace(a, loss=loss))))
    assert [one["client"] for one in metrics["refused"]] == [1]
    assert "its loss is" in metrics["refused"][0]["reason"]
    assert metrics["train_loss"] is not None


def test_bytes_count_what_was_sent_and_received(tmp_path):
    (fair,) = disturbed(tmp_path / "fair", lambda request, packet: packet)
    large = spoilt(lambda a: to_packet(replace(a, message=bytes(10_000_000))))
    (oversize,) = disturbed(tmp_path / "oversize", large)
    assert oversize["up"] == fair["up"] * 4 // 5 + 10_000_000
    transport = Nodes(tmp_path / "four", count=5)
    del transport.configs[101]
    run_on_nodes(replace(ONE, cohort=5), tmp_path / "b", transport)
    (without,) = read_run(tmp_path / "b").metrics
    assert [one["client"] for one in without["refused"]] == [1]
    assert without["down"] == fair["down"] * 4 // 5
    assert without["up"] == fair["up"] * 4 // 5


@pytest.mark.parametrize(
    ("algorithm", "value"), [("feddyn", 3.4e38), ("fedadam", 1e20), ("fedyogi", 1e20), ("fedadagrad", 1e20)]
)
def test_a_non_finite_aggregate_of_finite_updates_is_not_saved(tmp_path, algorithm, value):
    """The run stops at that round and can be resumed once the node behaves."""

    def vast(request, packet):
        if request.kind == "hello" or request.client == 0 or request.round != 2:
            return packet
        response = from_packet(packet, Response, 1 << 30)
        header, state = decode(response.message)
        huge = {n: torch.full_like(t, value) if t.is_floating_point() else t for n, t in state.items()}
        return to_packet(replace(response, message=encode(huge, header)))

    transport = Nodes(tmp_path / "nodes", count=5)
    transport.change = vast
    experiment = replace(BASE, algorithm=algorithm, cohort=5)
    with pytest.raises(
        RunError, match=r"round 2: the aggregated model.*The state before this round is kept.*max_norm"
    ):
        run_on_nodes(experiment, tmp_path / "a", transport)
    assert len(read_run(tmp_path / "a").metrics) == 1
    assert all(tensor.isfinite().all() for tensor in final_checkpoint(tmp_path / "a").state.values())
    transport.change = lambda request, packet: packet
    run_on_nodes(experiment, tmp_path / "a", transport)
    assert len(read_run(tmp_path / "a").metrics) == 3
