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


@pytest.mark.parametrize(
    ("test", "said"),
    [
        (Examples(torch.randn(6, 4), torch.arange(6) % 5, 5), r"labels up to 4: .*Target 4 is out of bounds"),
        (Examples(torch.randn(6, 5), torch.zeros(6, dtype=torch.int64), 3), r"of shape \(5,\)"),
        (
            Examples(torch.randn(6, 4).double(), torch.zeros(6, dtype=torch.int64), 3),
            "torch.float64 of shape",
        ),
    ],
    ids=["a label too many", "another shape", "double examples"],
)
def test_test_data_that_does_not_fit_is_refused_before_the_first_round(test, said):
    train = Examples(torch.randn(40, 4), LABELS, 3)
    shared = fp.FederatedData(train, [range(20), range(20, 40)])
    own = fp.FederatedData(train, [range(20), range(20, 40)], personal=(test, [range(3), range(3, 6)]))
    tasks = (
        (fp.Task(small(), test=test), shared, "the test data"),
        (fp.Task(small()), own, "the clients' test data"),
    )
    for task, federation, which in tasks:
        with pytest.raises(ConfigError, match=f"cannot be scored on {which}, .*{said}"):
            fp.simulate(task, federation, algorithms.fedavg(lr=0.1), rounds=1, cohort=2)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"1\._extra_state is extra state.*as a buffer"):
        simulate(nn.Sequential(nn.Flatten(), Extra(4, 3)), torch.randn(40, 4))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on_round": 3}, "on_round is 3: expected a function"),
        ({"link": "float16"}, r"link is 'float16': expected a Link, such as Link\(up='float16'\)"),
        ({"max_norm": "a"}, "max_norm is 'a': expected a positive bound"),
        ({"target": "x"}, "target is 'x': expected an accuracy"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(given, said):
    data = fp.FederatedData(Examples(torch.randn(40, 4), LABELS, 3), [range(20), range(20, 40)])
    with pytest.raises(ConfigError, match=said):
        fp.simulate(fp.Task(small()), data, algorithms.fedavg(lr=0.1), rounds=1, cohort=2, **given)


def test_an_empty_test_set_is_refused():
    train = Examples(torch.randn(40, 4), LABELS, 3)
    with pytest.raises(ConfigError, match="the test data hold no example"):
        fp.simulate(
            fp.Task(small(), test=train.subset([])),
            fp.FederatedData(train, [range(20), range(20, 40)]),
            algorithms.fedavg(lr=0.1),
            rounds=1,
            cohort=2,
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": small()}, "task is of type Sequential: expected fedpara's Task"),
        ({"data": Examples(torch.randn(40, 4), LABELS, 3)}, "data is of type Examples"),
        ({"algorithm": "fedavg"}, "algorithm is of type str: expected fedpara's Algorithm"),
        ({"memory": {}}, "memory is of type dict: expected something with `get` and `put`"),
    ],
    ids=["model", "examples", "word", "dict"],
)
def test_an_argument_of_another_kind_is_refused_by_name(change, said):
    data = fp.FederatedData(Examples(torch.randn(40, 4), LABELS, 3), [range(20), range(20, 40)])
    given = {"task": fp.Task(small()), "data": data, "algorithm": algorithms.fedavg(lr=0.1), **change}
    with pytest.raises(ConfigError, match=said):
        fp.simulate(**given, rounds=1, cohort=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "mlp"}, "model is of type str: expected torch's Module"),
        ({"model": nn.Linear}, "model is the class Linear"),
        ({"test": (1, 2)}, "test is of type tuple: expected fedpara's Examples"),
    ],
    ids=["word", "class", "pair"],
)
def test_a_task_is_a_model_and_examples(given, said):
    with pytest.raises(ConfigError, match=said):
        fp.Task(**{"model": small(), **given})
