"""A model that its examples cannot train is refused before the run, with what to do about it."""

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.errors import ConfigError

LABELS = torch.arange(40) % 3


def simulate(model, inputs, **images):
    data = fp.FederatedData(Examples(inputs, LABELS, 3, **images), [range(20), range(20, 40)])
    return fp.simulate(fp.Task(model), data, algorithms.fedavg(lr=0.1), rounds=1, cohort=2)


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("model", "inputs", "cure"),
    [
        (
            small().double(),
            torch.randn(40, 4),
            r"float32 examples.*holds torch.float64: make both of one type",
        ),
        (
            small(),
            torch.randn(40, 4).double(),
            r"float64 examples.*holds torch.float32: make both of one type",
        ),
        (
            small(),
            torch.zeros(40, 1, 2, 2, dtype=torch.uint8),
            "int64 examples.*taken for indices.*mean and std",
        ),
        (
            small(),
            torch.randn(40, 5),
            r"float32 examples of shape \(5,\).*shapes cannot be multiplied[^.]*\.$",
        ),
    ],
    ids=["a double model", "double examples", "bytes", "another shape"],
)
def test_a_misfit_is_refused_with_its_cure(model, inputs, cure):
    with pytest.raises(ConfigError, match=f"cannot be trained on torch.{cure}"):
        simulate(model, inputs)


def test_the_cures_work():
    assert simulate(small(), torch.randn(40, 4)).rounds
    assert simulate(small(), torch.zeros(40, 1, 2, 2, dtype=torch.uint8), mean=(0.5,), std=(0.5,)).rounds
