"""A client that was never able to train is named at the end of a run."""

import pytest

import fedpara as fp
from fedpara import algorithms, data
from fedpara.models import mlp


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize(("empty", "others"), [([3], ""), ([1, 3], ", and 1 more")])
def test_a_client_that_is_refused_in_every_round_is_named(caplog, engine, empty, others):
    train, test = data.load("digits")
    clients = [[] if i in empty else range(10 * i, 10 * i + 10) for i in range(5)]
    fp.simulate(
        fp.Task(mlp(64, 8, 10), test),
        fp.FederatedData(train, clients),
        algorithms.fedavg(lr=0.1),
        rounds=3,
        cohort=5,
        lost=0.2,
        engine=engine,
    )
    says = f"client {empty[0]} was refused in each of its rounds{others}: it holds no examples"
    assert [record.getMessage() for record in caplog.records if "refused in each" in record.getMessage()] == [
        says
    ]
