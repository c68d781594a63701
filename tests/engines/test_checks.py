"""A run that cannot work is rejected before its first round, with advice."""

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
    ("model", "inputs", "advice"),
    [
        (
            small().double(),
            torch.randn(40, 4),
            r"float32 examples.*holds torch.float64: convert one of the two",
        ),
        (
            small(),
            torch.randn(40, 4).double(),
            r"float64 examples.*holds torch.float32: convert one of the two",
        ),
        (
            small(),
            torch.zeros(40, 1, 2, 2, dtype=torch.uint8),
            "int64 examples.*without a mean and std are read as indices",
        ),
        (
            small(),
            torch.randn(40, 5),
            r"float32 examples of shape \(5,\).*shapes cannot be multiplied[^.]*\.$",
        ),
    ],
    ids=["a double model", "double examples", "bytes", "another shape"],
)
def test_data_that_does_not_fit_the_model_is_rejected_with_advice(model, inputs, advice):
    with pytest.raises(ConfigError, match=f"cannot train on torch.{advice}"):
        simulate(model, inputs)


def test_classes_as_floats_are_rejected_with_advice():
    inputs = torch.randn(40, 4)
    data = fp.FederatedData(Examples(inputs, LABELS.float()), [range(20), range(20, 40)])
    with pytest.raises(ConfigError, match=r"Classes are integers: convert the targets with \.long\(\)"):
        fp.simulate(fp.Task(small()), data, algorithms.fedavg(lr=0.1), rounds=1, cohort=2)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_small_integers_are_classes(engine):
    """They give the run that int64 gives."""
    inputs = torch.randn(40, 4)
    runs = []
    for labels in (LABELS, LABELS.int()):
        train = Examples(inputs, labels)
        data = fp.FederatedData(train, [range(20), range(20, 40)])
        torch.manual_seed(0)
        task = fp.Task(small(), train, metrics=("accuracy", "f1"))
        runs.append(
            fp.simulate(
                task, data, algorithms.fedavg(lr=0.1), rounds=2, cohort=2, engine=engine, device="cpu"
            )
        )
    assert runs[0].rounds[-1].scores == runs[1].rounds[-1].scores


def test_following_the_advice_works():
    assert simulate(small(), torch.randn(40, 4)).rounds
    assert simulate(small(), torch.zeros(40, 1, 2, 2, dtype=torch.uint8), mean=(0.5,), std=(0.5,)).rounds


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (Examples(torch.randn(6, 4), torch.arange(6) % 5, 5), r"labels up to 4: .*Target 4 is out of bounds"),
        (Examples(torch.randn(6, 5), torch.zeros(6, dtype=torch.int64), 3), r"of shape \(5,\)"),
        (
            Examples(torch.randn(6, 4).double(), torch.zeros(6, dtype=torch.int64), 3),
            "torch.float64 examples of shape",
        ),
    ],
    ids=["a label too many", "another shape", "double examples"],
)
def test_test_data_that_does_not_fit_is_rejected_before_the_first_round(test, message):
    train = Examples(torch.randn(40, 4), LABELS, 3)
    shared = fp.FederatedData(train, [range(20), range(20, 40)])
    own = fp.FederatedData(train, [range(20), range(20, 40)], personal=(test, [range(3), range(3, 6)]))
    tasks = (
        (fp.Task(small(), test=test), shared, "the test data"),
        (fp.Task(small()), own, "the clients' test data"),
    )
    for task, federation, which in tasks:
        with pytest.raises(ConfigError, match=f"cannot be scored on {which}, .*{message}"):
            fp.simulate(task, federation, algorithms.fedavg(lr=0.1), rounds=1, cohort=2)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_rejected_by_name():
    with pytest.raises(ConfigError, match=r"1\._extra_state is extra state.*as a buffer"):
        simulate(nn.Sequential(nn.Flatten(), Extra(4, 3)), torch.randn(40, 4))


def test_an_empty_test_set_is_rejected():
    train = Examples(torch.randn(40, 4), LABELS, 3)
    with pytest.raises(ConfigError, match="the test data hold no example"):
        fp.simulate(
            fp.Task(small(), test=train.subset([])),
            fp.FederatedData(train, [range(20), range(20, 40)]),
            algorithms.fedavg(lr=0.1),
            rounds=1,
            cohort=2,
        )


BAD_SETTINGS = {
    "rounds": 0,
    "cohort": 7,
    "seed": -1,
    "evaluate_every": 0,
    "max_norm": 0.0,
    "target": 80.0,
    "engine": "parallel",
    "share": "some",
    "personal": True,
    "privacy": 1.0,
    "devices": {"bandwidth": 1e6},
}


@pytest.mark.parametrize("name", sorted(BAD_SETTINGS))
def test_impossible_settings_are_rejected_before_anything_runs(world, name):
    with pytest.raises(
        ConfigError, match=r"expected|choose a smaller cohort|no client has test data|Known: all"
    ):
        world.simulate(world.model(), **{name: BAD_SETTINGS[name]})


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("target", [-1, 3])
def test_a_target_that_is_no_class_names_its_client(engine, target):
    x = torch.randn(4, 2)
    good, bad = (x, torch.tensor([0, 1, 2, -100])), (x, torch.tensor([0, 1, target, 2]))
    task = fp.Task(nn.Linear(2, 3))
    how = {"rounds": 1, "cohort": 3, "engine": engine, "device": "cpu"}
    message = f"has the target {target}: expected 0 to 2 for a model with 3 outputs, or -100"
    with pytest.raises(ConfigError, match=f"client 1 {message}"):
        fp.simulate(task, fp.FederatedData.of([good, bad, good]), algorithms.fedavg(), **how)
    read = fp.FederatedData.of([good, bad, good].__getitem__, clients=3)
    (result,) = fp.simulate(task, read, algorithms.fedavg(), **how).rounds
    assert [client for client, _ in result.refused] == [1]
    assert message in result.refused[0][1]
    with pytest.raises(ConfigError, match=f"the test data have the target {target}"):
        fp.simulate(task, fp.FederatedData.of([good], test=bad), algorithms.fedavg(), **{**how, "cohort": 1})
