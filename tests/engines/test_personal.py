"""Contract: private parts differ per client, and each client's own model is scored."""

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.data import normalise
from fedpara.engines.memory import InMemory
from fedpara.engines.session import PRIVATE
from fedpara.errors import ConfigError, RunError

KINDS = [
    *(("pfedpara", "all"), ("original", "fedper"), ("original", "none"), ("pfedpara", "fedper")),
    ("fedpara", "all but fc1"),
]

each_kind = pytest.mark.parametrize(("scheme", "share"), KINDS)


def accuracy(model, state, examples):
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        logits = model(normalise(examples.inputs, examples.mean, examples.std))
    return float((logits.argmax(1) == examples.targets).double().mean())


def everybody(world, scheme, share, rounds, memory=None, **fields):
    return world.simulate(
        world.model(scheme),
        world.algorithm(**fields),
        federation=world.personal,
        share=share,
        rounds=rounds,
        cohort=6,
        memory=memory,
    )


@each_kind
def test_clients_agree_on_the_shared_part_and_differ_in_the_private_one(world, scheme, share):
    run = everybody(world, scheme, share, 2)
    program = run.session.program
    states = [run.client_state(client) for client in range(6)]
    for name in program.shared:
        assert all(torch.equal(state[name], run.state[name]) for state in states)
    for name in program.private:
        assert not torch.equal(states[0][name], states[1][name])
        assert torch.equal(run.state[name], program.initial[name])
        assert not torch.equal(states[0][name], program.initial[name])


@each_kind
def test_before_and_after_are_the_clients_own_models_on_their_own_examples(world, scheme, share):
    """`before` in round 2 scores the new shared part with the client's private part from round 1."""
    first, both = (everybody(world, scheme, share, rounds, epochs=3) for rounds in (1, 2))
    model, mine = world.model(scheme), world.personal
    expected = [accuracy(model, first.client_state(k), mine.client_test(k)) for k in range(6)]
    assert both.rounds[1].before == pytest.approx(sum(expected) / 6, abs=1e-12)
    if share == "none":  # nothing is received: `after` of this round is `before` of the next
        assert both.rounds[0].after == both.rounds[1].before
        expected = [accuracy(model, both.client_state(k), mine.client_test(k)) for k in range(6)]
        assert both.rounds[1].after == pytest.approx(sum(expected) / 6, abs=1e-12)
    assert both.accuracy == both.rounds[1].after
    assert both.rounds[1].loss is None


def test_local_is_each_client_training_alone(world):
    together = everybody(world, "original", "none", 3)
    for client in range(6):
        rows = world.personal.clients[client]
        others = [range(0)] * 6
        others[client] = rows
        alone = world.simulate(
            world.model(), federation=fp.FederatedData(world.train, others), share="none", rounds=3, cohort=6
        )
        state = alone.client_state(client)
        assert all(torch.equal(state[name], t) for name, t in together.client_state(client).items())


def test_a_client_starts_from_the_initial_private_part_and_then_keeps_its_own(world):
    memory = InMemory()
    everybody(world, "pfedpara", "all", 1, memory)
    once = {name: t.clone() for name, t in memory.get(0)[PRIVATE].items()}
    assert set(once) == {"fc1.weight.x2", "fc1.weight.y2"}
    twice = everybody(world, "pfedpara", "all", 2)
    assert not any(torch.equal(twice.client_state(0)[name], t) for name, t in once.items())


def test_personal_scores_are_beside_the_global_score_if_all_is_shared(world):
    run = everybody(world, "fedpara", "all", 1)
    result = run.rounds[0]
    assert result.loss is not None
    assert result.accuracy == accuracy(world.model("fedpara"), run.state, world.test)
    assert result.before is not None
    assert result.after is not None


def test_clients_without_test_examples_do_not_count(world):
    rows = [list(row) for row in world.clients]
    tests = [row[-2:] if client % 2 else [] for client, row in enumerate(rows)]
    federation = fp.FederatedData(world.train, [row[:-2] for row in rows], test_clients=tests)
    some = world.simulate(world.model(), federation=federation, share="none", rounds=1, cohort=6)
    mine, model = world.personal, world.model()
    odd = [accuracy(model, some.client_state(k), mine.client_test(k)) for k in (1, 3, 5)]
    assert some.accuracy == pytest.approx(sum(odd) / 3, abs=1e-12)


def test_private_models_have_no_accuracy_without_personal_test_data(world):
    run = world.simulate(world.model("pfedpara"))
    assert all(result.accuracy is None for result in run.rounds)
    with pytest.raises(RunError, match="no accuracy was measured"):
        _ = run.accuracy
    with pytest.raises(ConfigError, match="needs test data to be measured on"):
        world.simulate(world.model("pfedpara"), target=0.5)


def test_a_private_last_layer_helps_clients_with_two_classes():
    """Clients with different classes: a private last layer beats the global model, even before local training."""
    train, test = data.load("digits")
    clients = data.shards(train.targets, 10, 0)
    theirs = data.personal_test(test.targets, clients, train.targets, seed=0)
    federation = fp.FederatedData(train, clients, personal=(test, theirs))

    def score(share):
        torch.manual_seed(0)
        task, algorithm = fp.Task(models.mlp(64, 32, 10)), algorithms.fedavg(lr=0.1)
        return fp.simulate(task, federation, algorithm, rounds=4, cohort=10, share=share).rounds[-1].before

    assert score("fedper") > score("all") + 0.1


def test_clients_without_test_examples_do_not_count_before_training(world):
    rows = [list(row) for row in world.clients]
    tests = [row[-2:] if client % 2 else [] for client, row in enumerate(rows)]
    federation = fp.FederatedData(world.train, [row[:-2] for row in rows], test_clients=tests)
    some = world.simulate(world.model(), federation=federation, share="none", rounds=2, cohort=6)
    assert some.rounds[1].before == some.rounds[0].after


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "ditto"])
def test_named_norms_stay_on_the_clients_with_their_statistics(digits, engine, algorithm, tmp_path):
    """FedBN. Both engines have the same numbers, and a resumed run has the same bits."""

    def run(engine, rounds=3, **more):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
        )
        options = {"share": "all but 2", "engine": engine, "cohort": 4, "rounds": rounds}
        federation = fp.FederatedData(digits[0], [range(k, 160, 7) for k in range(6)])
        method = algorithms.build(algorithm, algorithms.Local(lr=0.05, batch_size=11, steps=2))
        return fp.simulate(fp.Task(network), federation, method, **options, **more)

    whole = run(engine)
    program = whole.session.program
    statistics = {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert program.local == {"2.weight", "2.bias", *statistics}
    assert not program.local & {*whole.session.up, *whole.session.down}
    a, b = (whole.client_state(client) for client in whole.rounds[-1].cohort[:2])
    assert not any(torch.equal(a[name], b[name]) for name in program.local - {"2.num_batches_tracked"})
    assert torch.equal(a["1.weight"], b["1.weight"]) == (
        algorithm != "ditto"
    )  # whose clients own a whole model
    other = run("sequential" if engine == "batched" else "batched")
    for client in range(6):
        ours, theirs = whole.client_state(client), other.client_state(client)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
    run(engine, 2, out=tmp_path / "run")
    resumed = run(engine, out=tmp_path / "run")
    assert all(torch.equal(tensor, whole.state[name]) for name, tensor in resumed.state.items())


def test_statistics_alone_make_a_clients_model_its_own(digits):
    """A norm without weights: no parameter is private, and still there is no global model to score."""
    norm = nn.BatchNorm1d(8, affine=False)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm, nn.ReLU(), nn.Linear(8, 10))
    federation = fp.FederatedData(digits[0], [range(k, 160, 4) for k in range(4)])
    options = {"share": "all but 2", "rounds": 2, "cohort": 4}
    run = fp.simulate(
        fp.Task(network, test=digits[1]), federation, algorithms.fedavg(lr=0.05, batch_size=20), **options
    )
    assert not run.session.program.private
    assert run.session.program.local == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert run.rounds[-1].accuracy is None
    a, b = (run.client_state(client) for client in (0, 1))
    assert not torch.equal(a["2.running_mean"], b["2.running_mean"])


def test_a_part_that_the_model_does_not_have_is_named(world):
    with pytest.raises(
        ConfigError, match=r"share names 'head', .* no such module or parameter: .*\(fc1, fc2\)"
    ):
        world.simulate(world.model(), share="all but fc1, head")


def test_a_client_outside_the_federation_has_no_model(world):
    run = everybody(world, "pfedpara", "all", 1)
    with pytest.raises(RunError, match="client 6 is not in the federation: expected 0 to 5"):
        run.client_state(6)


def test_a_test_set_that_scores_no_model_is_named(world, caplog):
    world.simulate(world.model("original"), world.algorithm(), rounds=1, cohort=2)
    assert not caplog.messages
    world.simulate(world.model("original"), world.algorithm(), rounds=1, cohort=2, share="none")
    assert caplog.messages[0].startswith("the test set is not used: ")
