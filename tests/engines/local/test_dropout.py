"""Dropout from the client's stream: unbiased, new in every step and layer, the same in every engine."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

import fedpara as fp
from fedpara import algorithms, data
from fedpara.engines.local.dropout import SeededDropout, layer_seed, seeded_dropouts, step_seed
from fedpara.engines.rng import torch_seed


def stream(seed, round, client):
    return torch_seed(seed, "layers", round, client)


def dropped(p, seed, shape=(200, 100)):
    model = nn.Sequential(nn.Dropout(p))
    (dropout,) = seeded_dropouts(model).values()
    dropout.seed.fill_(seed)
    return model(torch.ones(shape))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_dropped_share_is_p_and_the_rest_is_scaled(p):
    y = dropped(p, step_seed(stream(0, 1, 2), 3))
    kept = (y != 0).double().mean()
    assert abs(float(kept) - (1 - p)) < 5 * (p * (1 - p) / y.numel()) ** 0.5
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_rows_and_columns_are_dropped_evenly():
    kept = (dropped(0.5, 12345, (400, 400)) != 0).double()
    for means in (kept.mean(0), kept.mean(1)):
        assert float((means - 0.5).abs().max()) < 5 * 0.5 / 400**0.5


def test_every_client_round_step_and_layer_draws_new_values():
    clients = [stream(0, 1, 2), stream(1, 1, 2), stream(0, 2, 2), stream(0, 1, 3)]
    seeds = [step_seed(client, 3) for client in clients] + [step_seed(clients[0], 4)]
    seeds += [layer_seed(seeds[0], 1)]
    masks = [dropped(0.5, seed) != 0 for seed in seeds]
    for i, a in enumerate(masks):
        for b in masks[i + 1 :]:
            assert 0.47 < float((a == b).double().mean()) < 0.53


def test_a_short_batch_gets_the_draws_of_the_first_rows_of_a_longer_one():
    assert torch.equal(dropped(0.5, 7, (3, 10)), dropped(0.5, 7, (8, 10))[:3])


def test_each_lane_draws_from_its_own_seed():
    model = nn.Sequential(nn.Dropout(0.5))
    seeded_dropouts(model)
    seeds = torch.tensor([5, 9])
    y = vmap(lambda s: functional_call(model, {"0.seed": s}, (torch.ones(20, 20),)))(seeds)
    assert torch.equal(y[0], dropped(0.5, 5, (20, 20)))
    assert torch.equal(y[1], dropped(0.5, 9, (20, 20)))


def test_dropout_is_active_only_in_training_and_absent_from_the_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout1d(0.5))
    assert [type(m) for m in seeded_dropouts(model).values()] == [SeededDropout]
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    x = torch.randn(3, 4)
    assert torch.equal(model.eval()[1](x), x)


@pytest.mark.parametrize("jacobian", [0.0, 1.0])
def test_engines_drop_the_same_values(jacobian):
    train, test = data.load("digits")
    train, test = train.subset(np.arange(160)), test.subset(np.arange(60))
    clients = data.dirichlet(train.targets, clients=8, alpha=0.5, seed=0)
    states = []
    for engine in ("sequential", "batched"):
        torch.manual_seed(0)
        layers = (
            nn.Flatten(),
            nn.Linear(64, 24),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(24, 10),
            nn.Dropout(0.1),
        )
        model = fp.factorize(nn.Sequential(*layers), fp.FedPara(gamma=0.3), init="calibrated", force=True)
        method = algorithms.fedavg(lr=0.05, batch_size=8, epochs=2, jacobian=jacobian)
        run = fp.simulate(
            fp.Task(model, test=test),
            fp.FederatedData(train, clients),
            method,
            rounds=3,
            cohort=4,
            engine=engine,
        )
        assert run.engine.startswith(engine)
        states.append(run.state)
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], rtol=1e-5, atol=1e-5), name


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x), self.drop(x)


def test_a_second_call_draws_new_values_and_the_next_step_starts_over():
    model = Twice()
    (dropout,) = seeded_dropouts(model).values()
    steps = []
    for _ in range(2):
        dropout.seed.fill_(77)
        dropout.calls = 0
        steps.append(model(torch.ones(40, 50)))
    (one, two), (three, four) = steps
    assert 0.45 < float((one == two).double().mean()) < 0.55
    assert torch.equal(one, three)
    assert torch.equal(two, four)
    assert torch.equal(one, dropped(0.5, 77, (40, 50)))


def test_engines_agree_if_a_layer_is_called_twice(world):
    def network():
        shared = nn.Dropout(0.5)
        layers = (
            nn.Flatten(),
            nn.Linear(64, 32),
            shared,
            nn.ReLU(),
            nn.Linear(32, 32),
            shared,
            nn.Linear(32, 10),
        )
        return nn.Sequential(*layers)

    runs = [world.simulate(world.model(network=network), engine=name) for name in ("sequential", "batched")]
    assert runs[1].engine.startswith("batched")
    for name, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[name], rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_repeats_the_same_draws():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    (dropout,) = seeded_dropouts(model).values()
    x, gradients = torch.ones(5, 8), []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        dropout.calls = 0
        gradients.append(torch.autograd.grad(run(x).square().sum(), model[0].weight)[0])
    assert torch.equal(*gradients)
    dropout.calls = 0
    twice = checkpoint(lambda x: model[1](model(x)), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="called several times"):
        twice.sum().backward()


class Aside(nn.Module):
    """Drops in place and ignores the returned tensor."""

    def __init__(self, aside):
        super().__init__()
        self.first, self.drop, self.last = (
            nn.Linear(64, 20),
            nn.Dropout(0.5, inplace=aside),
            nn.Linear(20, 10),
        )
        self.aside = aside

    def forward(self, x):
        h = self.first(x.flatten(1))
        dropped = self.drop(h)
        return self.last(h if self.aside else dropped)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_in_place_dropout_changes_its_input(engine):
    train, _ = data.load("digits")
    federation = fp.FederatedData(train, [range(40), range(40, 100)])
    states = []
    for aside in (True, False):
        torch.manual_seed(0)
        run = fp.simulate(
            fp.Task(Aside(aside)),
            federation,
            algorithms.fedavg(lr=0.1, batch_size=16),
            rounds=2,
            cohort=2,
            engine=engine,
        )
        assert run.engine.startswith(engine)
        states.append(run.state)
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
