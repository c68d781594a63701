"""Validation data of a federation: a part of every client, in memory or read client by client."""

import sys

import pytest
import torch

import fedpara as fp
from fedpara.data.validation import hold_out
from fedpara.errors import ConfigError, DataError
from fedpara.experiments import Experiment, resume, run
from fedpara.experiments.build import build
from fedpara.experiments.studies.tune import tune

SIZES = [20, 2, 1, 7]


def source(client):
    """Each example holds its client and its number, so that it can be recognised."""
    rows = torch.arange(float(SIZES[client]))
    return torch.stack([torch.full_like(rows, client), rows], 1), (rows % 2).long()


class Reading:
    """`source`, which records the clients that are read."""

    def __init__(self, broken=()):
        self.read, self.broken = [], broken

    def __call__(self, client):
        self.read.append(client)
        if client in self.broken:
            raise OSError("the disk is gone")
        return source(client)


def rows(examples):
    return [tuple(row) for row in examples.inputs.tolist()]


def federations():
    return {
        "in memory": fp.FederatedData.of([source(i) for i in range(4)]),
        "read": fp.FederatedData.of(Reading(), clients=4),
        "read, sizes known": fp.FederatedData.of(Reading(), clients=4, sizes=SIZES),
    }


@pytest.mark.parametrize("name", federations())
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.9])
def test_every_client_gives_its_part_and_trains_on_the_rest(name, fraction):
    given = federations()[name]
    kept, scored = hold_out(given, fraction, seed=3, personal=True)
    held = []
    for client, size in enumerate(SIZES):
        mine, theirs = rows(kept.client(client)), rows(kept.client_test(client))
        assert sorted(mine + theirs) == sorted(rows(given.client(client)))
        assert len(theirs) == (min(max(round(fraction * size), 1), size - 1) if size > 1 else 0)
        assert kept.size(client) == len(mine)
        held += theirs
    assert sorted(rows(scored)) == sorted(held)
    assert kept.sizes.tolist() == [kept.size(client) for client in range(4)]
    assert not hold_out(given, fraction, seed=3, personal=False)[0].has_personal


def test_the_same_examples_are_held_out_however_the_data_is_held():
    found = [hold_out(one, 0.25, 3, False) for one in federations().values()]
    assert len({tuple(sorted(rows(scored))) for _, scored in found}) == 1
    assert rows(found[0][1]) != rows(hold_out(federations()["read"], 0.25, 4, False)[1])
    pool, placed, problems = found[1][0].pool([3, 0])
    assert (len(pool), problems) == (len(placed[3]) + len(placed[0]), {})


def test_clients_are_read_one_at_a_time_and_a_broken_one_is_refused_later():
    reading = Reading(broken=[1])
    kept, scored = hold_out(fp.FederatedData.of(reading, clients=4), 0.25, 0, False)
    assert {row[0] for row in rows(scored)} == {0, 3}
    assert max(map(reading.read.count, range(4))) <= 3
    with pytest.raises(DataError, match="the disk is gone"):
        kept.client(1)


def test_texts_give_their_ends():
    text = fp.FederatedData.of([(torch.arange(20).reshape(10, 2), torch.zeros(10, dtype=torch.int64))] * 2)
    kept, scored = hold_out(text, 0.3, 0, False)
    assert kept.client(1).inputs[:, 0].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert scored.inputs[:, 0].tolist() == [14, 16, 18] * 2


def test_nothing_to_spare_is_said():
    with pytest.raises(ConfigError, match="no client has an example to spare"):
        hold_out(fp.FederatedData.of([source(2)] * 3), 0.5, 0, False)


MODULE = """
import torch
import fedpara as fp

def load(seed=0):
    def read(client):
        generator = torch.Generator().manual_seed(client)
        x = torch.randn(12 + client, 4, generator=generator)
        return x, (x.sum(1) > 0).long()
    return fp.FederatedData.of(read, clients=5, test=read(5))

def net(width=8):
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))
"""


@pytest.fixture
def lazily(tmp_path, monkeypatch):
    (tmp_path / "lazy_task.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield Experiment(
        dataset="lazy_task:load",
        model="lazy_task:net",
        scheme="original",
        cohort=2,
        rounds=2,
        steps=2,
        validation=0.25,
        engine="sequential",
    )
    sys.modules.pop("lazy_task", None)


def test_a_function_of_clients_can_be_tuned_and_resumed(lazily, tmp_path):
    (best,) = tune({"mine": lazily}, tmp_path / "tune", {"lr": [0.01, 0.3]}, validation=0.25, final_seeds=[1])
    assert best.choice.chosen.examples == len(build(lazily).task.test) == sum([3, 3, 4, 4, 4])
    assert best.final.runs[0].experiment.validation == 0
    assert len(build(best.final.runs[0].experiment).task.test) == 17
    whole = run(lazily, tmp_path / "whole")
    run(lazily, tmp_path / "part", on_round=lambda *_: False)
    resume(tmp_path / "part")
    assert (tmp_path / "part" / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()
