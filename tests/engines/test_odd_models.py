"""Models that keep more than plain parameters: buffers of every kind, tied weights, frozen factors."""

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara.engines.loop import Schedule, play
from fedpara.engines.memory import InMemory
from fedpara.engines.program import take_apart
from fedpara.errors import ConfigError

EVEN = [range(12 * i, 12 * i + 12) for i in range(5)]


class Centred(nn.Module):
    """Subtracts a running mean of its inputs."""

    def __init__(self, persistent=True, in_place=True):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            with torch.no_grad():
                moved = 0.5 * self.mean + x.mean() + 1
                if self.in_place:
                    self.mean.copy_(moved)
                else:
                    self.mean = moved
        return self.fc(x - self.mean)


KINDS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(("persistent", "in_place"), KINDS)
def test_a_buffer_is_the_clients_own_however_it_is_written(world, engine, persistent, in_place):
    protocol = world.protocol(world.model("original", lambda: Centred(persistent, in_place)))
    federation = fp.FederatedData(world.train, EVEN)
    seen = world.engine(engine, protocol, InMemory(), federation)
    result = next(iter(play(protocol, seen, Schedule(1, 5, 5), personal=False)))
    assert not result.refused
    expected = {reply.client: reply.message for reply in seen.up[0]}
    assert len({*expected.values()}) == 5
    for clients in ([4, 3, 2, 1, 0], [2]):
        again = world.engine(engine, protocol, InMemory(), federation)
        for reply in again.train(1, clients, seen.down[0], personal=False):
            assert bytes(reply.message) == expected[reply.client]
    if persistent:
        assert float(result.progress.buffers["mean"]) > 1


@pytest.mark.parametrize(("persistent", "in_place"), KINDS)
def test_both_engines_agree_on_buffers(world, persistent, in_place):
    federation = fp.FederatedData(world.train, EVEN)
    one, other = (
        world.simulate(
            world.model("original", lambda: Centred(persistent, in_place)),
            federation=federation,
            engine=engine,
            cohort=5,
            rounds=3,
        )
        for engine in ("sequential", "batched")
    )
    assert other.engine.startswith("batched" if persistent else "sequential")
    assert persistent or "buffer" in other.engine or "captured Tensor" in other.engine
    for name, tensor in one.state.items():
        torch.testing.assert_close(tensor, other.state[name], rtol=1e-5, atol=1e-6)


class Twice(nn.Module):
    """One layer under two names, and one of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.first.weight
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.again(torch.relu(self.first(x.flatten(1)))))


def frozen(weight, factors=None):
    def build():
        model = fp.factorize(Twice(), fp.FedPara(gamma=0.1))
        for name, parameter in model.state_dict(keep_vars=True).items():
            if name.startswith(f"{weight}.") and (factors is None or name.rpartition(".")[2] in factors):
                parameter.requires_grad_(False)
        return model

    return build


@pytest.mark.parametrize("jacobian", [0.0, 1.0])
@pytest.mark.parametrize("weight", ["none", "out.weight", "first.weight"])
def test_tied_and_frozen_factors_train_alike_in_both_engines(world, weight, jacobian):
    one, other = (
        world.simulate(
            world.model("original", frozen(weight)), world.algorithm(jacobian=jacobian), engine=engine
        )
        for engine in ("sequential", "batched")
    )
    assert other.engine.startswith("batched")
    moved = set()
    for name, tensor in one.state.items():
        torch.testing.assert_close(tensor, other.state[name], rtol=1e-5, atol=1e-6)
        if not torch.equal(tensor, one.protocol.program.initial.get(name, tensor)):
            moved.add(name)
    assert moved >= {"first.bias", "again.bias", "out.bias"}
    for tied in ("first.weight", "out.weight"):
        assert any(name.startswith(f"{tied}.") for name in moved) == (tied != weight)


def test_half_a_weight_frozen_trains_but_not_batched_nor_corrected(world):
    model = world.model("original", frozen("out.weight", {"x1"}))
    assert take_apart(model).half_frozen == "out.weight"
    run = world.simulate(model, engine="batched")
    assert "some factors of out.weight are frozen" in run.engine
    assert torch.equal(run.state["out.weight.x1"], run.protocol.program.initial["out.weight.x1"])
    assert not torch.equal(run.state["out.weight.x2"], run.protocol.program.initial["out.weight.x2"])
    with pytest.raises(ConfigError, match=r"of out\.weight only some train"):
        world.simulate(model, world.algorithm(jacobian=1.0))


class TiedEnds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 10, bias=False)
        self.middle = nn.Linear(10, 64)
        self.out = nn.Linear(64, 10)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.relu(self.middle(self.embed(x.flatten(1)))))


def test_a_last_layer_that_is_tied_stays_on_the_device_too(world, engine):
    model = world.model("original", TiedEnds)
    assert take_apart(model, "fedper").private == {"embed.weight", "out.bias"}
    run = world.simulate(model, share="fedper", engine=engine, cohort=6, federation=world.personal)
    assert not {"embed.weight", "out.weight", "out.bias"} & run.progress.x.keys()
    kept = [run.client_state(client) for client in range(2)]
    assert not torch.equal(kept[0]["out.weight"], kept[1]["out.weight"])
    assert torch.equal(kept[0]["out.weight"], kept[0]["embed.weight"])
