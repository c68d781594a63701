"""FedMUD's protocol: the published setting, equal trials, and the sizes that its ratio allows."""

from dataclasses import replace

import pytest

from fedpara.experiments.storage.catalog import Library
from fedpara.experiments.studies.frontier.cost import parameters
from fedpara.experiments.studies.frontier.fedmud import FEDMUD, METHODS, SLACK
from fedpara.experiments.studies.frontier.study import ALL_SCALES, frontier_jobs, trials

CIFAR10 = FEDMUD["cifar10"]


def test_golden_the_published_setting():
    e = CIFAR10.experiment("mud+bkd+aad")
    assert (e.dataset, e.clients, e.cohort, e.rounds, e.split, e.alpha) == (
        "cifar10",
        100,
        10,
        200,
        "dirichlet",
        0.3,
    )
    assert (e.epochs, e.batch_size, e.momentum, e.weight_decay, e.lr_decay) == (3, 64, 0.0, 0.0, 1.0)
    assert (e.scheme, e.fold_every, e.where, e.link_up, e.link_down) == (
        "kronecker-aad",
        1,
        "inner",
        "float32",
        "float32",
    )
    assert CIFAR10.ratio == 1 / 32


@pytest.mark.parametrize("name", FEDMUD)
def test_every_method_has_the_same_trials(name):
    scale = FEDMUD[name]
    assert scale.combinations == METHODS
    assert {len(trials(scale, method)) for method in METHODS} == {len(scale.rates)}
    jobs = frontier_jobs(scale, "validation", Library({}))
    assert (
        len({job.experiment.identity for job in jobs})
        == len({job.name for job in jobs})
        == 6 * len(scale.rates)
    )
    assert ALL_SCALES[f"fedmud-{name}"] is scale


def larger(scale, method):
    """The scale with the next larger size of the method."""
    values = scale.networks[method]
    more = {"rank": values["rank"] + 1} if "rank" in values else {"ratio": values["ratio"] + SLACK}
    return replace(scale, networks={**scale.networks, method: {**values, **more}})


@pytest.mark.parametrize("name", FEDMUD)
@pytest.mark.parametrize("method", METHODS[1:])
def test_golden_a_size_is_the_largest_within_the_ratio(name, method):
    scale = FEDMUD[name]
    most = (scale.ratio + SLACK) * parameters(scale, "fedavg")
    assert parameters(scale, method) <= most
    if scale.networks[method].get("ratio") == scale.ratio:
        return  # FedMUD's code only lowers the ratio
    assert parameters(larger(scale, method), method) > most


def test_golden_parameters_on_cifar10():
    found = {method: parameters(CIFAR10, method) for method in METHODS}
    assert found == {
        "fedavg": 3_816_426,
        "lowrank": 121_418,
        "fedpara": 114_946,
        "mud": 121_418,
        "mud+bkd": 103_172,
        "mud+bkd+aad": 103_172,
    }
