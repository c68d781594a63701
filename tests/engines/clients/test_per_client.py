"""Contract of `Local.per_client`: a client's own rate, epochs, steps and batch size, in every engine."""

import pytest
import torch
from client_algorithms import own_settings

from fedpara import algorithms
from fedpara.algorithms import Local
from fedpara.engines.memory import InMemory
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.errors import ConfigError
from fedpara.wire import decode

CHANGES = (
    {"lr": 0.01},
    {"epochs": 3},
    {"steps": 5},
    {"batch_size": 2},
    {"lr": 0.2, "steps": 1, "batch_size": 7},
)


def updates(world, engine, algorithm):
    """What each client sends in its first round."""
    session = world.session(world.model(), algorithm)
    seen = world.engine(engine, session, InMemory())
    list(run_rounds(session, seen, Schedule(1, 6, 6, world.federation.size), personal=False))
    return {reply.client: decode(reply.message)[1] for reply in seen.up[0]}


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova"])
def test_a_client_trains_as_if_everybody_had_its_settings(world, engine, name, change):
    """SCAFFOLD's (x - y) / (K eta) and FedNova's length need the client's own K and eta."""
    mixed = updates(world, engine, world.algorithm(name, per_client=lambda k: change if k % 2 else {}))
    all_plain = updates(world, engine, world.algorithm(name))
    all_changed = updates(
        world, engine, algorithms.build(name, Local(**{"lr": 0.05, "batch_size": 4, **change}))
    )
    for client in range(6):
        expected, other = (all_changed, all_plain) if client % 2 else (all_plain, all_changed)
        for key, tensor in expected[client].items():
            torch.testing.assert_close(mixed[client][key], tensor, rtol=0, atol=1e-5)
        # A client with 5 examples makes one step of batch size 7 either way.
        assert change == CHANGES[3] or not all(
            torch.equal(mixed[client][k], t) for k, t in other[client].items()
        )


def test_scaffolds_control_is_the_mean_gradient_of_the_clients_own_steps(world, engine):
    """With one step of the whole data, c_i is the gradient: the same at every rate."""
    controls = []
    for rate in (0.01, 0.2):
        algorithm = world.algorithm(
            "scaffold", steps=1, batch_size=16, per_client=lambda k, r=rate: {"lr": r}
        )
        controls.append(updates(world, engine, algorithm))
    for client in range(6):
        for key, tensor in controls[0][client].items():
            if key.startswith("control"):
                torch.testing.assert_close(controls[1][client][key], tensor, rtol=1e-3, atol=1e-4)


def test_a_setting_that_cannot_differ_is_rejected(world, engine):
    with pytest.raises(
        ConfigError, match="per_client sets 'momentum' for client 0: expected lr, epochs, steps"
    ):
        world.simulate(
            world.model(), world.algorithm(per_client=lambda k: {"momentum": 0.9}), engine=engine, cohort=6
        )


def test_the_settings_of_a_client() -> None:
    local = Local(lr=0.1, epochs=2, batch_size=8, momentum=0.5, per_client=own_settings)
    assert local.of(0) == Local(lr=0.1, epochs=2, batch_size=8, momentum=0.5)
    assert (local.of(1).epochs, local.of(1).steps) == (None, 5)
    assert (local.of(2).lr, local.of(2).steps_for(9)) == (0.01, 2)
    assert (local.of(4).batch_size, local.of(4).steps_for(9)) == (2, 7)
    by_steps = Local(steps=3, per_client=lambda client: {"epochs": 2})
    assert (by_steps.of(0).epochs, by_steps.of(0).steps) == (2, None)
