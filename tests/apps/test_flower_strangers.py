"""What a node says is a stranger's word: it fills no log, sets no score that was not asked for, and is counted."""

from dataclasses import replace

import pytest
import torch
from flower_nodes import BASE, Nodes, by_flower, log

from fedpara.engines.parcels import Answer, Hello, packed, unpacked
from fedpara.engines.terms import Terms
from fedpara.engines.worker import Score
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import read_run
from fedpara.experiments.checkpoint import final_checkpoint
from fedpara.wire import decode, encode

FORGED = "x\n2026-01-01T00:00:00Z round 1: client 0 refused: forged\x1b[2J\x07" + "y" * 60_000
ONE = replace(BASE, rounds=1)


def spoilt(change):
    """Client 1's answers, changed."""

    def spoil(order, parcel):
        if order.kind == "hello" or order.client != 1:
            return parcel
        return change(unpacked(parcel, Answer, 1 << 30))

    return spoil


def disturbed(tmp_path, change, experiment=ONE):
    courier = Nodes(tmp_path / "nodes", count=5)
    courier.change = change
    by_flower(replace(experiment, cohort=5), tmp_path / "a", courier)
    return read_run(tmp_path / "a").metrics


@pytest.mark.parametrize(
    "change",
    [spoilt(lambda a: packed(replace(a, message=b"", reason=FORGED))), spoilt(lambda a: FORGED * 50)],
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
    def spoil(order, parcel):
        if order.kind != "hello":
            return parcel
        return packed(replace(unpacked(parcel, Hello, 0), **{field: FORGED}))

    with pytest.raises(RunError, match="was refused") as found:
        disturbed(tmp_path, spoil)
    for text in (str(found.value), log(tmp_path / "a")):
        assert len(text) < 10_000
        assert all(c.isprintable() or c == "\n" for c in text)
    assert "\n2026-01-01" not in log(tmp_path / "a")


def test_a_score_that_was_not_asked_for_is_none(tmp_path):
    perfect = spoilt(lambda a: packed(replace(a, before=Score(1, 1, 0.0), after=Score(1, 1, 0.0))))
    (metrics,) = disturbed(tmp_path, perfect, replace(ONE, scheme="pfedpara"))
    assert (metrics["accuracy"], metrics["before"], metrics["after"]) == (None, None, None)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_refused(tmp_path, loss):
    (metrics,) = disturbed(tmp_path, spoilt(lambda a: packed(replace(a, loss=loss))))
    assert [one["client"] for one in metrics["refused"]] == [1]
    assert "its loss is" in metrics["refused"][0]["reason"]
    assert metrics["train_loss"] is not None


def test_bytes_are_those_that_were_sent_and_those_that_came(tmp_path):
    (fair,) = disturbed(tmp_path / "fair", lambda order, parcel: parcel)
    large = spoilt(lambda a: packed(replace(a, message=bytes(10_000_000))))
    (oversize,) = disturbed(tmp_path / "oversize", large)
    assert oversize["up"] == fair["up"] * 4 // 5 + 10_000_000
    courier = Nodes(tmp_path / "four", count=5)
    del courier.configs[101]
    by_flower(replace(ONE, cohort=5), tmp_path / "b", courier)
    (without,) = read_run(tmp_path / "b").metrics
    assert [one["client"] for one in without["refused"]] == [1]
    assert without["down"] == fair["down"] * 4 // 5
    assert without["up"] == fair["up"] * 4 // 5


@pytest.mark.parametrize(
    ("algorithm", "value"), [("feddyn", 3.4e38), ("fedadam", 1e20), ("fedyogi", 1e20), ("fedadagrad", 1e20)]
)
def test_finite_updates_whose_aggregate_is_not_are_not_saved(tmp_path, algorithm, value):
    """The run stops at that round, and goes on from the one before when the node is gone."""

    def vast(order, parcel):
        if order.kind == "hello" or order.client == 0 or order.round != 2:
            return parcel
        answer = unpacked(parcel, Answer, 1 << 30)
        header, state = decode(answer.message)
        huge = {n: torch.full_like(t, value) if t.is_floating_point() else t for n, t in state.items()}
        return packed(replace(answer, message=encode(huge, header)))

    courier = Nodes(tmp_path / "nodes", count=5)
    courier.change = vast
    experiment = replace(BASE, algorithm=algorithm, cohort=5)
    with pytest.raises(
        RunError, match=r"round 2: the aggregated model.*The state before it is kept.*max_norm"
    ):
        by_flower(experiment, tmp_path / "a", courier)
    assert len(read_run(tmp_path / "a").metrics) == 1
    assert all(tensor.isfinite().all() for tensor in final_checkpoint(tmp_path / "a").state.values())
    courier.change = lambda order, parcel: parcel
    by_flower(experiment, tmp_path / "a", courier)
    assert len(read_run(tmp_path / "a").metrics) == 3


@pytest.mark.parametrize(
    "terms",
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
def test_terms_that_no_clock_and_no_count_has(terms):
    with pytest.raises(ConfigError, match=r"expected a (number of seconds|whole number)"):
        Terms(**terms)
