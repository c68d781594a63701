"""Contract of `send`: the server gets what it returns, and its random numbers are the same in every engine."""

from dataclasses import replace

import pytest
import torch
from client_algorithms import flipped, noisy, top_k

from fedpara import algorithms
from fedpara.algorithms import Visit
from fedpara.engines.memory import InMemory
from fedpara.engines.progress import Schedule
from fedpara.engines.rng import torch_seed
from fedpara.engines.server.rounds import run_rounds
from fedpara.errors import ConfigError
from fedpara.state import subtract
from fedpara.wire import decode


def sent(world, engine, send=None, rounds=1, scheme="original"):
    """(the server's model, what each client sent), round by round."""
    algorithm = world.algorithm()
    session = world.session(world.model(scheme), replace(algorithm, send=send) if send else algorithm)
    seen = world.engine(engine, session, InMemory())
    list(run_rounds(session, seen, Schedule(rounds, 6, 6, world.federation.size), personal=False))
    return [
        (decode(down)[1], {reply.client: decode(reply.message)[1] for reply in replies})
        for down, replies in zip(seen.down, seen.up, strict=True)
    ]


def test_noise_differs_between_clients_and_rounds_and_not_between_engines(world, engine):
    """Noise alone: a client sends x plus what the generator draws."""

    def only_noise(x, y, visit):
        generator = visit.generator()
        return {n: t + torch.randn(t.shape, generator=generator) for n, t in x.items()}

    seen = []
    for t, (x, updates) in enumerate(sent(world, engine, only_noise, rounds=2), 1):
        for client, update in updates.items():
            generator = torch.Generator().manual_seed(torch_seed(0, "send", t, client))
            for name, _ in world.model().named_parameters():  # `send` gets the model's order
                tensor = x[name]
                noise = torch.randn(tensor.shape, generator=generator)
                assert torch.equal(update[name], tensor + noise)
                seen.append(noise.flatten()[0].item())
    assert len(set(seen)) == len(seen)


def test_a_client_adds_noise_to_its_own_update(world, engine):
    (_, plain), (_, noised) = (sent(world, engine, send)[0] for send in (None, noisy))
    for client in range(6):
        change = torch.cat([t.flatten() for t in subtract(noised[client], plain[client]).values()])
        assert change.std().item() == pytest.approx(0.01, rel=0.1)


def test_top_k_sends_the_largest_changes_and_no_others(world, engine):
    (x, plain), (_, sparse) = (sent(world, engine, send)[0] for send in (None, top_k))
    for client in range(6):
        for name, tensor in plain[client].items():
            change, kept = (tensor - x[name]).flatten(), (sparse[client][name] - x[name]).flatten()
            chosen = kept.nonzero().flatten()
            assert len(chosen) <= max(1, tensor.numel() // 10)
            assert kept.abs().sum() > 0
            torch.testing.assert_close(kept[chosen], change[chosen], rtol=0, atol=1e-6)
            rest = change.clone()
            rest[chosen] = 0
            assert rest.abs().max() <= kept[chosen].abs().min() + 1e-6


def test_an_attack_changes_one_clients_update(world, engine):
    (x, plain), (_, attacked) = (sent(world, engine, send)[0] for send in (None, flipped))
    for client in range(6):
        sign = -1 if client == 2 else 1
        for name, tensor in plain[client].items():
            expected = x[name] + sign * (tensor - x[name])
            torch.testing.assert_close(attacked[client][name], expected, rtol=0, atol=1e-6)


def test_private_parameters_and_the_clients_own_model_are_not_changed(world, engine):
    """`send` changes the message; the client keeps what it trained."""
    runs = [
        world.simulate(
            world.model("pfedpara"),
            replace(world.algorithm(), send=send),
            federation=world.personal,
            rounds=1,
            cohort=6,
            engine=engine,
        )
        for send in (algorithms.fedavg().send, noisy)
    ]
    private = runs[0].session.program.private
    assert runs[0].rounds[0].after == runs[1].rounds[0].after
    for name in runs[0].state:
        equal = torch.equal(runs[0].client_state(0)[name], runs[1].client_state(0)[name])
        assert equal == (name in private), name


def test_a_visit_gives_the_same_numbers_at_every_call():
    visit = Visit(client=3, round=2, steps=5, eta=0.1, seed=11)
    assert torch.equal(torch.rand(4, generator=visit.generator()), torch.rand(4, generator=visit.generator()))


def test_a_visit_describes_the_clients_training(world, engine):
    visits = []

    def watch(x, y, visit):
        visits.append(visit)
        return y

    local = {"per_client": lambda k: {"lr": 0.01 * (k + 1), "steps": k + 1}, "lr_decay": 0.5}
    algorithm = replace(world.algorithm(**local), send=watch)
    world.simulate(world.model(), algorithm, rounds=2, cohort=6, engine=engine)
    trained = [visit for visit in visits if visit.seed]  # one call checks the function before the run
    assert {(v.round, v.client, v.steps) for v in trained} == {
        (t, k, k + 1) for t in (1, 2) for k in range(6)
    }
    for visit in trained:
        assert visit.eta == pytest.approx(0.01 * (visit.client + 1) * 0.5 ** (visit.round - 1))


def test_a_send_unlike_x_is_rejected_before_the_first_round(world, engine):
    bad = replace(world.algorithm(), send=lambda x, y, visit: {n: t.double() for n, t in y.items()})
    with pytest.raises(ConfigError, match="algorithm 'fedavg': send returned float64"):
        world.simulate(world.model(), bad, engine=engine)
