"""Participation in run folders: who takes part, the simulated clock and patience survive a resumption."""

from dataclasses import replace

import pytest

from fedpara.errors import ConfigError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.config_file import read_toml, to_toml
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.tensor_files import read_tensors

SMALL = Experiment(
    model="mlp",
    scheme="original",
    clients=10,
    cohort=4,
    rounds=6,
    steps=2,
    batch_size=16,
    lr=0.02,
    personal=True,
)
VARIED = replace(
    SMALL, sampler="poisson", lost=0.3, bandwidth="lognormal(1e5, 1)", speed=2.0, device_deadline=5.0
)


def stop_after(round):
    return lambda result, timing: result.number != round


def same_files(a, b):
    (one, theirs), (other, ours) = (read_tensors(path / "checkpoint.safetensors") for path in (a, b))
    assert theirs == ours
    assert all(one[name].equal(other[name]) for name in one)
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_resumed_run_continues_its_cohorts_and_its_clock(tmp_path, algorithm):
    experiment = replace(VARIED, algorithm=algorithm)
    whole = run(experiment, tmp_path / "whole")
    stopped = run(experiment, tmp_path / "stopped", on_round=stop_after(3))
    assert stopped.rounds == 3
    assert "stopped after round 3: on_round returned False" in (tmp_path / "stopped" / "log.txt").read_text()
    resume(tmp_path / "stopped")
    same_files(tmp_path / "whole", tmp_path / "stopped")
    clocks = [line["clock"] for line in whole.metrics]
    assert clocks == sorted(clocks)
    assert final_checkpoint(tmp_path / "whole").progress.clock == clocks[-1] > 0
    reasons = {entry["reason"].split(":")[0] for line in whole.metrics for entry in line["refused"]}
    assert "it was lost (simulated)" in reasons
    assert any("the deadline is 5 s (simulated)" in reason for reason in reasons)


def test_a_run_without_devices_has_no_clock_in_its_files(tmp_path):
    run(replace(SMALL, rounds=1), tmp_path / "run")
    assert "clock" not in read_run(tmp_path / "run").metrics[0]
    assert set(read_tensors(tmp_path / "run" / "checkpoint.safetensors")[1]) == {
        *("round", "bytes_up", "bytes_down", "groups", "identity", "metrics")
    }


@pytest.mark.parametrize("stop", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 2])
def test_patience_stops_a_resumed_run_in_the_same_round(tmp_path, stop, every):
    experiment = replace(SMALL, rounds=40, lr=1e-9, patience=2, evaluate_every=every, personal=False)
    whole = run(experiment, tmp_path / "whole")
    assert whole.rounds == 3 * every, "the first evaluation is the best one"
    run(experiment, tmp_path / "stopped", on_round=stop_after(stop))
    resume(tmp_path / "stopped")
    same_files(tmp_path / "whole", tmp_path / "stopped")
    resume(tmp_path / "stopped")  # finished: nothing is left to run
    assert read_run(tmp_path / "stopped").rounds == whole.rounds


def test_patience_survives_a_last_round_that_is_scored_out_of_turn(tmp_path):
    """Three rounds, scored every two, are prolonged: the score of round 3 does not count."""
    experiment = replace(SMALL, rounds=40, lr=1e-9, patience=2, evaluate_every=2, personal=False)
    whole = run(experiment, tmp_path / "whole")
    run(replace(experiment, rounds=3), tmp_path / "short")
    assert read_run(tmp_path / "short").metrics[2]["accuracy"] is not None
    assert resume(tmp_path / "short", rounds=40).rounds == whole.rounds


def test_the_last_row_has_everyones_worst_tenth_and_spread(tmp_path):
    first, last = run(replace(SMALL, rounds=2), tmp_path / "run").metrics
    assert "everyone" not in first
    everyone = last["everyone"]
    assert everyone.keys() == {"accuracy", "clients", "of", "bytes_down", "worst_tenth", "spread"}
    assert 0 <= everyone["worst_tenth"] <= everyone["accuracy"]
    assert everyone["spread"] >= 0


def test_the_fields_survive_toml(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(replace(VARIED, patience=3)))
    assert read_toml(tmp_path / "config.toml") == replace(VARIED, patience=3)


def test_the_fields_decide_the_identity_but_patience_does_not():
    assert replace(SMALL, patience=3).identity == SMALL.identity
    changes = ({"sampler": "by-data"}, {"lost": 0.1}, {"bandwidth": 5}, {"speed": "lognormal(1, 1)"})
    assert len({replace(SMALL, **change).identity for change in ({}, *changes)}) == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sampler": "poison"}, "unknown sampler 'poison': did you mean 'poisson'"),
        ({"lost": 1.0}, "lost is 1.0: expected a number of 0 or more and below 1"),
        ({"bandwidth": "fast"}, "bandwidth is 'fast': expected a number, or a distribution"),
        ({"device_deadline": 3.0}, "devices without bandwidth and speed take no time"),
    ],
)
def test_a_mistake_leaves_no_folder(tmp_path, change, says):
    with pytest.raises(ConfigError, match=says):
        run(replace(SMALL, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()
