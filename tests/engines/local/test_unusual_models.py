"""Models with more than plain parameters: buffers of every kind, tied weights, frozen factors."""

import numpy as np
import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara.engines.checks import smallest_batch
from fedpara.engines.memory import InMemory
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.errors import ConfigError, SchemeError

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
def test_a_buffer_never_reaches_the_next_client(world, engine, persistent, in_place):
    session = world.session(world.model("original", lambda: Centred(persistent, in_place)))
    federation = fp.FederatedData(world.train, EVEN)
    seen = world.engine(engine, session, InMemory(), federation)
    result = next(iter(run_rounds(session, seen, Schedule(1, 5, 5, federation.size), personal=False)))
    assert not result.refused
    expected = {reply.client: reply.message for reply in seen.up[0]}
    assert len({*expected.values()}) == 5
    for clients in ([4, 3, 2, 1, 0], [2]):
        again = world.engine(engine, session, InMemory(), federation)
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
    """One layer under two names, and another layer."""

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
def test_both_engines_agree_on_tied_and_frozen_factors(world, weight, jacobian):
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
        if not torch.equal(tensor, one.session.program.initial.get(name, tensor)):
            moved.add(name)
    assert moved >= {"first.bias", "again.bias", "out.bias"}
    for tied in ("first.weight", "out.weight"):
        assert any(name.startswith(f"{tied}.") for name in moved) == (tied != weight)


def test_a_weight_with_some_frozen_factors_trains_only_sequentially_and_uncorrected(world):
    model = world.model("original", frozen("out.weight", {"x1"}))
    assert make_program(model).half_frozen == "out.weight"
    run = world.simulate(model, engine="batched")
    assert "some factors of out.weight are frozen" in run.engine
    assert torch.equal(run.state["out.weight.x1"], run.session.program.initial["out.weight.x1"])
    assert not torch.equal(run.state["out.weight.x2"], run.session.program.initial["out.weight.x2"])
    with pytest.raises(ConfigError, match=r"some of out\.weight are frozen"):
        world.simulate(model, world.algorithm(jacobian=1.0))


def batch_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("sizes", "local", "smallest"),
    [
        ((8, 9), {"batch_size": 4}, 1),
        ((8, 9), {"batch_size": 4, "steps": 2}, 4),
        ((8, 9), {"batch_size": 4, "steps": 3}, 1),
        ((8, 1), {"batch_size": 4}, 1),
        ((8, 2), {"batch_size": 1}, 1),
        ((8, 0), {"batch_size": 4}, 4),
        ((3, 7), {"batch_size": 4}, 3),
        ((0, 0), {"batch_size": 4}, 0),
    ],
)
def test_a_batch_too_small_for_the_model_is_rejected_before_the_run(world, sizes, local, smallest):
    federation = fp.FederatedData(world.train, [range(n) for n in sizes])
    algorithm = world.algorithm(**local)
    assert smallest_batch(federation, algorithm.local) == smallest
    model = world.model("original", batch_norm)
    if smallest == 1:
        with pytest.raises(ConfigError, match=r"some client has such a batch .* another batch size"):
            world.simulate(model, algorithm, federation=federation, cohort=2)
        model.eval()  # it works in eval mode, but the run trains it
        with pytest.raises(ConfigError, match="some client has such a batch"):
            world.simulate(model, algorithm, federation=federation, cohort=2)
    else:
        world.simulate(model, algorithm, federation=federation, cohort=2)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(63, 10)),
            r"shape \(1, 8, 8\) .* cannot be multiplied",
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), r"labels up to 9: .* out of bounds"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10).double()),
            r"torch\.float32 examples .* dtype",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_examples_is_rejected_before_the_run(world, engine, network, said):
    with pytest.raises(ConfigError, match=said):
        world.simulate(world.model("original", network), engine=engine)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_torchs_old_weight_norm_is_rejected_by_name(world, engine):
    def network():
        return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(64, 10)))

    with pytest.raises(SchemeError, match=r"1\.weight is computed from other tensors"):
        world.simulate(world.model("original", network), engine=engine)


@pytest.mark.parametrize("field", ["rounds", "cohort", "evaluate_every"])
def test_counts_must_be_whole_numbers(world, field):
    with pytest.raises(ConfigError, match=rf"{field} is 1\.5: expected .*whole number"):
        world.simulate(world.model(), **{field: 1.5})
    world.simulate(world.model(), **{field: np.int64(2)})


class Looked(nn.Module):
    """Reads pixels as characters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 4, sparse=True)
        self.out = nn.Linear(256, 10)

    def forward(self, x):
        return self.out(self.embed((x.flatten(1) * 4).long().clamp(0, 255)).flatten(1))


def test_sparse_gradients_train_like_dense_ones(world, engine):
    dense = world.model("original", Looked)
    dense.embed.sparse = False
    algorithm = world.algorithm(clip=0.5, momentum=0.5)
    runs = [world.simulate(m, algorithm, engine=engine) for m in (world.model("original", Looked), dense)]
    for name, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[name], rtol=1e-5, atol=1e-6)


class TiedEnds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 10, bias=False)
        self.middle = nn.Linear(10, 64)
        self.out = nn.Linear(64, 10)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.relu(self.middle(self.embed(x.flatten(1)))))


def test_a_tied_last_layer_stays_private_too(world, engine):
    model = world.model("original", TiedEnds)
    assert make_program(model, "fedper").private == {"embed.weight", "out.bias"}
    run = world.simulate(model, share="fedper", engine=engine, cohort=6, federation=world.personal)
    assert not {"embed.weight", "out.weight", "out.bias"} & run.progress.x.keys()
    kept = [run.client_state(client) for client in range(2)]
    assert not torch.equal(kept[0]["out.weight"], kept[1]["out.weight"])
    assert torch.equal(kept[0]["out.weight"], kept[0]["embed.weight"])
