"""Local, the factories and the registry: what they accept, compute and reject."""

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara import algorithms, cosine
from fedpara.algorithms import Algorithm, Local, Update
from fedpara.errors import ConfigError

NAN = float("nan")


def test_defaults() -> None:
    assert Local() == Local(
        lr=0.1,
        lr_decay=1.0,
        epochs=1,
        steps=None,
        batch_size=32,
        momentum=0.0,
        weight_decay=0.0,
        clip=None,
        jacobian=0.0,
        jacobian_norm="plain",
    )


def test_lr_decays_per_round_from_round_1() -> None:
    local = Local(lr=0.1, lr_decay=0.992)
    assert local.lr_at(1) == 0.1
    assert local.lr_at(200) == pytest.approx(0.1 * 0.992**199, rel=1e-15)


@settings(deadline=None)
@given(n=st.integers(1, 10**6), batch=st.integers(1, 1000), epochs=st.integers(1, 20))
def test_steps_cover_every_example_each_epoch(n: int, batch: int, epochs: int) -> None:
    steps = Local(epochs=epochs, batch_size=batch).steps_for(n)
    assert steps % epochs == 0
    assert (steps // epochs - 1) * batch < n <= steps // epochs * batch


def test_steps_instead_of_epochs() -> None:
    local = Local(steps=7)
    assert (local.epochs, local.steps_for(1), local.steps_for(10**6)) == (None, 7, 7)
    assert local == Local(epochs=None, steps=7) == replace(Local(), steps=7) == replace(local, batch_size=32)
    assert Local(steps=7).steps_for(0) == Local().steps_for(0) == 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"lr": 0.0}, "lr is 0.0: expected a number above 0"),
        ({"lr": -1}, "lr is -1"),
        ({"lr": NAN}, "lr is nan"),
        ({"lr": "0.1"}, "lr is '0.1'"),
        ({"lr_decay": 0.0}, "lr_decay is 0.0: expected a number above 0 and at most 1"),
        ({"lr_decay": 1.1}, "lr_decay is 1.1"),
        ({"epochs": 0}, "epochs is 0: expected a whole number of 1 or more"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"epochs": None}, "epochs is None and steps is None: expected one of the two"),
        ({"epochs": 2, "steps": 5}, "epochs is 2 and steps is 5: expected one of the two"),
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 32.0}, "batch_size is 32.0"),
        ({"momentum": 1.0}, "momentum is 1.0: expected a number of 0 or more and below 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"weight_decay": -1e-4}, "weight_decay is -0.0001: expected a number of 0 or more"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"jacobian": -1.0}, "jacobian is -1.0"),
        (
            {"schedule": cosine},
            "schedule is the function cosine itself: call it, as in schedule=fp.cosine(...)",
        ),
        ({"jacobian_norm": "cubed"}, "jacobian_norm is 'cubed': expected 'plain', 'squared' or 'network'"),
    ],
)
def test_local_rejects(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Local(**fields)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("factory", "hyper", "text"),
    [
        (algorithms.fedprox, {"mu": -0.1}, "mu is -0.1: expected a number of 0 or more"),
        (algorithms.scaffold, {"server_lr": 0.0}, "server_lr is 0.0: expected a number above 0"),
        (algorithms.feddyn, {"alpha": 0}, "alpha is 0"),
        (algorithms.ditto, {"lambda_": -1}, "lambda_ is -1: expected a number of 0 or more"),
        (algorithms.ditto, {"personal_lr": 0.0}, "lr is 0.0"),
        (algorithms.ditto, {"personal_steps": 2.5}, "personal_steps is 2.5: expected a whole number"),
        (algorithms.feddyn, {"alpha": NAN}, "alpha is nan"),
        (algorithms.fedadam, {"beta1": 1.0}, "beta1 is 1.0"),
        (algorithms.fedadam, {"beta2": -0.1}, "beta2 is -0.1"),
        (algorithms.fedyogi, {"beta2": 1}, "beta2 is 1"),
        (algorithms.fedyogi, {"tau": 0.0}, "tau is 0.0"),
        (algorithms.fedadagrad, {"server_lr": "fast"}, "server_lr is 'fast'"),
        (algorithms.fedavg, {"lr": 0}, "lr is 0"),
        (
            algorithms.scaffold,
            {"epoch": 2},
            "unknown setting 'epoch' of the clients' training: did you mean 'epochs'?",
        ),
    ],
)
def test_factories_reject(factory: Callable[..., Algorithm], hyper: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        factory(**hyper)
    assert text in str(error.value)


def test_settings_per_client_may_be_a_dict() -> None:
    local = algorithms.fedavg(lr=0.1, per_client={3: {"epochs": 2}}).local
    assert (local.of(3).epochs, local.of(0).epochs) == (2, 1)


def test_factories_accept_fields_or_a_local_or_both() -> None:
    base = Local(lr=0.3, epochs=5)
    assert algorithms.fedavg(lr=0.3, epochs=5).local == base
    assert algorithms.fedprox(0.2, local=base).local is not None
    assert algorithms.scaffold(local=base, batch_size=64).local == replace(base, batch_size=64)


def test_published_defaults() -> None:
    def defaults(factory: Callable[..., Algorithm]) -> dict[str, Any]:
        parameters = inspect.signature(factory).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}

    adam = {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    assert defaults(algorithms.fedprox) == {"mu": 0.1}
    assert defaults(algorithms.scaffold) == {"server_lr": 1.0}
    assert defaults(algorithms.feddyn) == {"alpha": 0.1}
    assert defaults(algorithms.ditto) == {"lambda_": 0.1, "personal_lr": None, "personal_steps": None}
    assert defaults(algorithms.fedadam) == defaults(algorithms.fedyogi) == adam
    assert defaults(algorithms.fedadagrad) == {"server_lr": 0.01, "beta1": 0.0, "tau": 1e-3}


@pytest.mark.parametrize("name", algorithms.names())
def test_build_by_name(name: str) -> None:
    local = Local(lr=0.2, steps=3)
    algorithm = algorithms.build(name, local)
    assert (algorithm.name, algorithm.local) == (name, local)
    with pytest.raises(FrozenInstanceError):
        algorithm.name = "other"  # type: ignore[misc]


def test_build_passes_hyper_parameters() -> None:
    gradient, y, x = ({"w": torch.tensor([value])} for value in (1.0, 3.0, 2.0))
    prox = algorithms.build("fedprox", Local(), mu=0.5)
    assert prox.correct(gradient, y, x, {}, {})["w"].item() == 1.5


@pytest.mark.parametrize(
    ("name", "hyper", "text"),
    [
        ("fedavgg", {}, "unknown algorithm 'fedavgg': did you mean 'fedavg'?"),
        ("SCAFFOLD", {}, "did you mean 'scaffold'?"),
        ("fedavg", {"mu": 0.1}, "fedavg has no hyper-parameter 'mu': it has none"),
        ("fedadagrad", {"beta2": 0.9}, "it has server_lr, beta1, tau"),
        ("fedprox", {"lr": 0.1}, "fedprox has no hyper-parameter 'lr': it has mu"),
    ],
)
def test_build_rejects(name: str, hyper: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        algorithms.build(name, Local(), **hyper)
    assert text in str(error.value)


def test_fedadagrad_has_no_momentum_unless_asked() -> None:
    """m equals this round's d, as published."""
    x = {"w": torch.zeros(2)}
    algorithm = algorithms.fedadagrad()
    _, server = algorithm.aggregate(x, algorithm.server_init(x), [Update({"w": torch.ones(2)}, {}, 1)], 1)
    assert torch.equal(server["m"]["w"], torch.ones(2))
