"""Properties: the repr of an object is a few short lines with its main facts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedpara as fp
from fedpara import algorithms, models
from fedpara.data import Examples
from fedpara.engines import Progress, Round
from fedpara.engines.batched.round_plan import plan_round
from fedpara.experiments import Summary
from fedpara.experiments.storage.catalog import Library

LINES, CHARACTERS = 5, 400


def short(thing) -> str:
    text = repr(thing)
    assert len(text.splitlines()) <= LINES, text
    assert len(text) <= CHARACTERS, text
    return text


def examples(count=40, shape=(64,), **more):
    labels = torch.arange(count) % 10
    return Examples(torch.zeros(count, *shape), labels, 10, **more)


@pytest.fixture(scope="module")
def run():
    train = examples()
    model = fp.factorize(models.mlp(inputs=64, classes=10), fp.PFedPara(gamma=0.1))
    data = fp.FederatedData(train, [range(20), range(20, 40)], personal=(train, [range(20), range(20, 40)]))
    algorithm = algorithms.scaffold(lr=0.1, steps=1, batch_size=4)
    return fp.simulate(fp.Task(model), data, algorithm, rounds=3, cohort=2, engine="sequential")


def test_a_run(run):
    text = short(run)
    assert "3 rounds of scaffold" in text
    assert f"{run.bytes / 1e6:.2f} MB" in text
    assert f"{run.accuracy:.2%} after round 3" in text
    assert run.engine[:40] in text


def test_a_run_with_a_long_engine_note_and_no_accuracy(run):
    rounds = tuple(replace(one, scores={}) for one in run.rounds)
    text = short(replace(run, rounds=rounds, engine="sequential: " + "because " * 200))
    assert "accuracy: not measured" in text
    assert "sequential: because" in text


def test_a_round_and_its_progress(run):
    last = run.rounds[-1]
    text = short(last)
    assert text.startswith("Round(3, 2 clients, train loss ")
    assert f"{last.accuracy:.2%}" in text
    assert f"{last.bytes_up:,} bytes up" in text
    text = short(run.progress)
    assert "round 3" in text
    assert f"{run.progress.bytes_down:,} down" in text
    assert f"{len(run.progress.x)} tensors" in text


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**5),
    st.floats(width=32),
    st.none() | st.floats(0, 1),
    st.integers(0, 50),
)
def test_any_round(number, clients, loss, accuracy, refused):
    progress = Progress(number, {"w": torch.zeros(3)}, {}, {}, 10**15, 10**15)
    said = tuple((client, "its update is not finite " * 9) for client in range(refused))
    text = short(
        Round(
            progress,
            tuple(range(clients)),
            loss,
            10**15,
            0,
            said,
            {} if accuracy is None else {"accuracy": accuracy},
        )
    )
    assert text.startswith(f"Round({number}, {clients} client")
    assert (f"{refused} refused" in text) == (refused > 0)
    assert ("not measured" in text) == (accuracy is None)


def test_a_program_and_a_session(run):
    program = run.session.program
    assert f"trains: {len(program.parameters)} tensors" in short(program)
    count = sum(program.initial[name].numel() for name in program.private)
    assert f"private: {len(program.private)} tensors, {count:,} numbers" in short(program)
    assert short(run.session) == "Session(scaffold, pfedpara, seed 0, link: float32 down, float32 up)"


def test_a_plan(run):
    data = fp.FederatedData(examples(), [range(20), range(20, 40)])
    plan = plan_round(run.session, [data.indices(0), data.indices(1)], "none", 1, [0, 1], 2)
    assert short(plan) == "RoundPlan(2 clients in 2 lanes, 1 steps, batches of 4)"


@given(st.integers(0, 500), st.lists(st.integers(1, 4), max_size=4), st.integers(1, 10**6), st.booleans())
def test_any_examples(count, shape, classes, owned):
    labels = torch.zeros(count, dtype=torch.int64)
    inputs = torch.zeros(count, *shape, dtype=torch.uint8)
    text = short(Examples(inputs, labels, classes, owners=labels if owned else None))
    assert text.startswith(f"Examples({count} examples, uint8 of shape {shape}, {classes} classes")
    assert ("with owners" in text) == owned


@given(st.integers(1, 10**6))
def test_federated_data_of_any_size(clients):
    text = short(fp.FederatedData(examples(), np.zeros((clients, 1), np.int64)))
    assert f"{clients:,} client" in text
    assert "40 examples" in text


@given(st.integers(0, 1000), st.integers(1, 400), st.none() | st.floats(0, 1))
def test_any_summary(rounds, depth, accuracy):
    line = {"accuracy": accuracy, "total_up": 10**12, "total_down": 0}
    metrics = [{"round": number, **line} for number in range(1, rounds + 1)]
    path = Path("/".join(["folder"] * depth), "last-run")
    experiment = fp.Experiment(dataset="hub:an-organisation/a-data-set@" + "0" * 40)
    summary = Summary(path, experiment, metrics, [{"seconds": 1.5}] * rounds)
    text = short(summary)
    assert "last-run" in text
    assert f"{rounds} of {experiment.rounds} rounds" in text
    if rounds and accuracy is not None:
        assert f"accuracy: {accuracy:.2%}" in text
    library = Library({experiment.identity: (summary,) * 50})
    assert short(library) == "Library(50 runs of 1 experiments, 1 seed, 0 damaged)"
