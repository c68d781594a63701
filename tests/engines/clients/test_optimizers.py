"""Contract of local optimizers in the engines: torch.optim's steps, reset each round or kept by the client."""

import client_algorithms
import pytest
import torch
from torch.nn.functional import cross_entropy

import fedpara as fp
from fedpara.algorithms import Local
from fedpara.data import normalise
from fedpara.engines.memory import InMemory
from fedpara.engines.rng import numpy_rng
from fedpara.engines.session import PRIVATE
from fedpara.errors import ConfigError

CASES = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=0.02)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)),
    "adam": (
        {"optimizer": "adam", "betas": (0.8, 0.95), "eps": 1e-3},
        lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), eps=1e-3),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1, "eps": 1e-3},
        lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-3),
    ),
}
SLOTS = {"sgd": set(), "momentum": {"velocity"}, "adam": {"m", "v", "count"}, "adamw": {"m", "v", "count"}}
every = pytest.mark.parametrize("name", CASES)


def one_client(world, engine, rounds, memory=None, scheme="fedpara", **fields):
    """A federation of one client: a round is then plain training, and the server's mean changes nothing."""
    return world.simulate(
        world.model(scheme),
        world.algorithm(**{"lr": 0.02, "batch_size": 5, **fields}),
        federation=fp.FederatedData(world.train, [range(12)]),
        rounds=rounds,
        cohort=1,
        engine=engine,
        memory=memory,
    )


def by_hand(world, make, rounds, kept):
    model = world.model("fedpara")
    examples = world.train.subset(range(12))
    images = normalise(examples.inputs, examples.mean, examples.std)
    optimizer = make(model.parameters())
    for t in range(1, rounds + 1):
        optimizer = optimizer if kept else make(model.parameters())
        order = numpy_rng(0, "batches", t, 0).permutation(12)
        for start in range(0, 12, 5):
            batch = torch.from_numpy(order[start : start + 5])
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), examples.targets[batch]).backward()
            optimizer.step()
    return model.state_dict()


@every
@pytest.mark.parametrize("kept", [False, True])
def test_rounds_are_torchs_steps(world, engine, name, kept):
    fields, make = CASES[name]
    run = one_client(world, engine, 3, keep_optimizer=kept, **fields)
    for key, tensor in by_hand(world, make, 3, kept).items():
        torch.testing.assert_close(run.state[key], tensor, rtol=0, atol=2e-5)


@every
def test_kept_slots_are_in_the_clients_memory(world, engine, name):
    fields, _ = CASES[name]
    memory = InMemory()
    run = one_client(world, engine, 2, memory, keep_optimizer=True, **fields)
    kept = memory.get(0) or {}
    assert {key.removeprefix("optimizer.") for key in kept if key != PRIVATE} == SLOTS[name]
    for slot in SLOTS[name] - {"count"}:
        state = kept[f"optimizer.{slot}"]
        assert state.keys() == set(run.session.program.parameters)
        assert all(tensor.abs().sum() > 0 for tensor in state.values())
    if "count" in SLOTS[name]:
        assert kept["optimizer.count"]["k"] == 2 * 3


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_a_kept_optimizer_differs_from_a_reset_one_from_round_2(world, engine, name):
    fields, _ = CASES[name]
    for rounds, equal in ((1, True), (2, False)):
        kept, reset = (
            one_client(world, engine, rounds, keep_optimizer=k, **fields).state for k in (True, False)
        )
        assert all(torch.equal(kept[n], reset[n]) for n in kept) is equal


def test_a_reset_optimizer_leaves_nothing_with_the_client(world, engine):
    memory = InMemory()
    one_client(world, engine, 2, memory, optimizer="adam")
    assert memory.get(0) is None


@pytest.mark.parametrize("kept", [False, True])
def test_private_factors_have_slots_too(world, engine, kept):
    """pFedPara's second factors train with Adam like the rest, and their slots stay with the client."""
    memory = InMemory()
    run = one_client(world, engine, 2, memory, "pfedpara", optimizer="adam", keep_optimizer=kept)
    private = run.session.program.private
    assert private
    assert (private <= memory.get(0).get("optimizer.m", {}).keys()) is kept
    assert not any(torch.equal(run.client_state(0)[n], run.session.program.initial[n]) for n in private)


def test_lanes_that_wait_keep_their_slots(world):
    """Clients of one to four steps share lanes: a client that is done must not move while others step."""
    algorithm = client_algorithms.adamw_kept(batch_size=4)
    memories = []
    for engine in ("sequential", "batched"):
        memories.append(InMemory())
        world.simulate(world.model(), algorithm, rounds=3, cohort=6, engine=engine, memory=memories[-1])
    for client in range(6):
        counts = [float(memory.get(client)["optimizer.count"]["k"]) for memory in memories]
        assert counts == [3 * -(-len(world.clients[client]) // 4)] * 2


def test_a_custom_optimizer_is_named_in_errors_and_not_combined_with_sgds_options():
    with pytest.raises(
        ConfigError, match=r"momentum is 0\.9 with optimizer soft-sign: it applies to sgd only"
    ):
        Local(optimizer=client_algorithms.soft_sign(), momentum=0.9)
    with pytest.raises(ConfigError, match="unknown optimizer 'adma': did you mean 'adam'"):
        Local(optimizer="adma")


def test_a_custom_optimizer_steps_as_written(world, engine):
    """y -= lr sign(g) with saturated tanh: every weight with a gradient moves by lr or by nothing."""

    def step(y, g, slots, lr):
        return {n: t - lr * torch.sign(g[n]) for n, t in y.items()}, slots

    mine = fp.algorithms.Optimizer("sign", lambda y: {}, step)
    run = one_client(world, engine, 1, optimizer=mine, steps=1)
    first = run.session.program.initial
    moved = torch.cat([(run.state[n] - t).abs().flatten() for n, t in first.items()])
    near = torch.isclose(moved, torch.tensor(0.02), atol=1e-6) | (moved == 0)
    assert near.all()
    assert (moved > 0).float().mean() > 0.5
