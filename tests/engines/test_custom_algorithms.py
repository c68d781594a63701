"""Custom algorithms: every engine keeps their variables, or rejects them before the run."""

import re
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms
from fedpara.data import Examples
from fedpara.engines.memory import InMemory
from fedpara.errors import ConfigError, RunError
from fedpara.state import add, zeros_like

ENGINES = ["sequential", "batched"]


def federation(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 4, generator=generator).to(dtype)
    return fp.FederatedData(
        Examples(inputs, torch.arange(60) % 3, 3), [range(i, i + 10) for i in range(0, 60, 10)]
    )


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def simulate(algorithm, engine, dtype=torch.float32):
    memory = InMemory()
    run = fp.simulate(
        fp.Task(network(dtype)),
        federation(dtype),
        algorithm,
        rounds=4,
        cohort=6,
        engine=engine,
        memory=memory,
    )
    assert run.engine.startswith(engine)
    return run, memory


def counting(base, begin: bool = True):
    """`base`, where each client also counts its rounds."""

    def first(x):
        return {**base.client_init(x), **({"count": {"rounds": torch.zeros(())}} if begin else {})}

    def finish(x, y, down, client, steps, eta):
        sent, kept = base.finish(x, y, down, client, steps, eta)
        before = client.get("count", {}).get("rounds", torch.zeros(()))
        return sent, {**kept, "count": {"rounds": before + 1}}

    return replace(base, client_init=first, finish=finish)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "feddyn", "scaffold"])
def test_a_custom_variable_is_kept_between_rounds(name, engine):
    base = algorithms.build(name, algorithms.Local(lr=0.1, batch_size=5))
    plain, _ = simulate(base, engine)
    counted, memory = simulate(counting(base), engine)
    assert [float(memory.get(client)["count"]["rounds"]) for client in range(6)] == [4.0] * 6
    assert all(torch.equal(counted.state[n], t) for n, t in plain.state.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_variable_without_an_initial_value_is_rejected(engine):
    base = algorithms.fedavg(lr=0.1, batch_size=5)
    with pytest.raises(
        ConfigError, match=r"finish returns client variables with other names than client_init"
    ):
        simulate(counting(base, begin=False), engine)


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_variables_keep_the_models_type_in_both_engines(name):
    algorithm = algorithms.build(name, algorithms.Local(lr=0.05, batch_size=5))
    (a, _), (b, memory) = (simulate(algorithm, engine, torch.bfloat16) for engine in ENGINES)
    kept = {t.dtype for state in memory.get(0).values() for t in state.values()}
    assert kept == {torch.bfloat16}
    for key, tensor in a.state.items():
        torch.testing.assert_close(b.state[key], tensor, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", ["private", "personal", ""])
def test_a_variable_cannot_have_a_reserved_name(name):
    mine = replace(
        algorithms.fedavg(lr=0.1),
        client_init=lambda x: {name: {n: torch.zeros_like(t) for n, t in x.items()}},
    )
    with pytest.raises(ConfigError, match=f"names a variable '{name}', which is reserved"):
        simulate(mine, "sequential")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, server: x, "returned dict: expected (the new x, the server's new variables), two dicts"),
        (lambda x, server: None, "returned NoneType: expected (the new x"),
        (lambda x, server: (x, None), "returned tuple: expected (the new x"),
        (
            lambda x, server: ({n: x[n] for n in list(x)[1:]}, server),
            "returned nothing for '0.weight': expected float32",
        ),
        (
            lambda x, server: ({**x, "own": x["0.bias"]}, server),
            "returned float32 (8,) for 'own': expected nothing",
        ),
        (
            lambda x, server: ({**x, "0.bias": 1.0}, server),
            "returned float for '0.bias': expected float32 (8,)",
        ),
        (lambda x, server: ({**x, "0.bias": x["0.bias"][:1]}, server), "returned float32 (1,) for '0.bias'"),
        (
            lambda x, server: ({**x, "0.bias": x["0.bias"].double()}, server),
            "returned float64 (8,) for '0.bias'",
        ),
        (lambda x, server: (x, {"rounds": 3}), "returned a dict in which 'rounds' holds int: expected"),
        (
            lambda x, server: (x, {"own": {"h": 3}}),
            "returned a state that holds int: expected a dict of states",
        ),
    ],
)
def test_an_aggregate_unlike_x_is_rejected_in_its_round(spoil, message, engine):
    base = algorithms.fedavg(lr=0.1, batch_size=5)
    own = replace(base, name="own", aggregate=lambda *given: spoil(*base.aggregate(*given)))
    with pytest.raises(ConfigError, match=re.escape(f"algorithm 'own': aggregate {message}")):
        fp.simulate(fp.Task(network()), federation(), own, rounds=1, cohort=6, engine=engine)


def test_on_any_device_marks_only_the_function_itself():
    base = algorithms.fedavg(lr=0.1)

    def own(x, server, updates, clients, scale=1):
        return base.aggregate(x, server, updates, clients)

    class Method:
        def aggregate(self, x, server, updates, clients):
            return base.aggregate(x, server, updates, clients)

    def marked(aggregate):
        return replace(base, aggregate=aggregate).on_any_device

    assert base.on_any_device
    assert not marked(own)
    assert not marked(wraps(base.aggregate)(lambda *given: own(*given))), "wraps copies attributes"
    assert not marked(Method().aggregate)
    assert marked(algorithms.on_any_device(partial(own, scale=2)))
    assert not marked(own), "a mark on a partial belongs to the partial"
    algorithms.on_any_device(own)
    assert marked(own)
    assert marked(partial(partial(own, scale=2), scale=3))
    assert marked(algorithms.on_any_device(Method().aggregate))
    assert marked(Method().aggregate), "the mark applies to every instance"


@pytest.mark.parametrize("engine", ENGINES)
def test_running_out_of_memory_in_the_server_ends_the_run_with_advice(engine):
    def aggregate(*_):
        raise torch.OutOfMemoryError("no room")

    own = replace(algorithms.fedavg(lr=0.1), aggregate=aggregate)
    with pytest.raises(RunError, match=r"round 1: the device is out of memory .* Use a smaller batch"):
        simulate(own, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("correct", "message"),
    [
        (lambda g: None, "returned nothing for '0.weight': expected float32 (8, 4)"),
        (lambda g: {}, "returned nothing for '0.weight': expected float32 (8, 4)"),
        (lambda g: {f"model.{n}": t for n, t in g.items()}, "returned nothing for '0.weight'"),
        (lambda g: {n: t.sum() for n, t in g.items()}, "returned float32 () for '0.weight'"),
        (lambda g: {n: t.double() for n, t in g.items()}, "returned float64 (8, 4) for '0.weight'"),
    ],
    ids=["nothing", "empty", "misspelt", "sums", "wider"],
)
def test_a_correct_unlike_the_gradient_is_rejected_before_the_first_round(correct, message, engine):
    own = replace(algorithms.fedavg(lr=0.1), name="own", correct=lambda g, *_: correct(g))
    with pytest.raises(ConfigError, match=re.escape(f"algorithm 'own': correct {message}")):
        simulate(own, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("function", "made", "message"),
    [
        ("server_init", None, "returned NoneType: expected a dict of states"),
        ("broadcast", {"h": 1.0}, "returned a dict in which 'h' holds float: expected a dict of states"),
        ("client_init", [], "returned list: expected a dict of states"),
        ("finish", {}, "returned dict: expected a pair of dicts"),
        ("finish", ({}, {}, {}), "returned tuple: expected a pair of dicts"),
        ("finish", (None, {}), "returned NoneType: expected a dict of states"),
    ],
)
def test_invalid_variables_are_rejected_before_the_first_round(function, made, message, engine):
    own = replace(algorithms.fedavg(lr=0.1), name="own", **{function: lambda *_: made})
    with pytest.raises(ConfigError, match=re.escape(f"algorithm 'own': {function} {message}")):
        simulate(own, engine)


def test_finish_and_aggregate_both_need_the_mark():
    base = algorithms.fedavg(lr=0.1)
    assert not replace(base, finish=lambda *given: base.finish(*given)).on_any_device


@pytest.mark.parametrize("engine", ENGINES)
def test_an_aggregate_sees_each_clients_number_and_loss(engine):
    """As in q-FedAvg and AFL, where clients with a larger loss count more."""
    seen = []

    def aggregate(x, server, updates, clients):
        seen.append({u.client: u.loss for u in updates})
        total = sum(u.loss for u in updates)
        return {name: sum(u.loss / total * u.y[name] for u in updates) for name in x}, server

    run, _ = simulate(replace(algorithms.fedavg(lr=0.1), name="fair", aggregate=aggregate), engine)
    for losses, result in zip(seen, run.rounds, strict=True):
        assert sorted(losses) == sorted(result.cohort)
        assert sum(losses.values()) / len(losses) == pytest.approx(result.train_loss)
    assert len(set(seen[0].values())) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"correct": lambda g: g},
            r"correct failed: .* It is called as correct\(gradient, y, x, down, client\)",
        ),
        ({"finish": lambda x, y: ({}, {})}, r"It is called as finish\(x, y, down, client, steps, lr\)"),
        ({"send": lambda y: y}, r"It is called as send\(x, y, visit\)"),
        ({"correct": lambda g, y, x, down, client: down["m"]}, "correct failed: KeyError: 'm'"),
        ({"aggregate": lambda x, updates: x}, r"It is called as aggregate\(x, server, updates, clients\)"),
        (
            {"aggregate": algorithms.FromMean(lambda x, mean: (x, {}))},
            r"FromMean's step failed: TypeError: .* as step\(",
        ),
        (
            {"aggregate": algorithms.FromMean(lambda x, server, mean, clients: (x, server["v"]))},
            "FromMean's step failed: KeyError: 'v'",
        ),
    ],
)
def test_a_function_with_other_arguments_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        simulate(replace(algorithms.fedavg(lr=0.1), **changes), "sequential")


@pytest.mark.parametrize(
    ("schedule", "message"),
    [(lambda at: 1.0, "called as schedule"), (lambda at, rounds: None, "schedule returned NoneType")],
)
def test_a_schedule_that_gives_no_factor_is_named(schedule, message):
    with pytest.raises(ConfigError, match=message):
        simulate(algorithms.fedavg(lr=0.1, schedule=schedule), "sequential")


def halved(tensors):
    for tensor in tensors.values():
        tensor /= 2


@pytest.mark.parametrize(
    ("function", "spoil"),
    [
        ("client_init", lambda x: halved(x) or {}),
        ("correct", lambda g, y, x, down, client: halved(y) or g),
        ("finish", lambda x, y, down, client, steps, lr: halved(client["h"]) or ({}, client)),
        ("send", lambda x, y, visit: halved(x) or y),
        ("send", lambda x, y, visit: x.clear() or y),
    ],
)
def test_a_function_that_changes_what_it_was_given_is_named(function, spoil):
    """The received model is shared: on the sequential engine the next client would start from the changed one."""
    base = replace(algorithms.fedavg(lr=0.1), name="own", client_init=lambda x: {"h": {"n": torch.zeros(2)}})
    base = replace(base, finish=lambda x, y, down, client, steps, lr: ({}, client))
    with pytest.raises(ConfigError, match=f"algorithm 'own': {function} changes what it was given"):
        simulate(replace(base, **{function: spoil}), "sequential")


def test_a_correct_may_write_to_its_gradient():
    def correct(gradient, y, x, down, client):
        halved(gradient)
        return gradient

    run, _ = simulate(replace(algorithms.fedavg(lr=0.1), correct=correct), "sequential")
    other, _ = simulate(algorithms.fedavg(lr=0.05), "sequential")
    torch.testing.assert_close(run.state, other.state)


def momentum(step):
    base = algorithms.fedavg(lr=0.1)
    return replace(
        base, name="own", server_init=lambda x: {"v": zeros_like(x)}, aggregate=algorithms.FromMean(step)
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x, server, mean, clients: (mean.y, {}), "aggregate returned no variable 'v'"),
        (
            lambda x, server, mean, clients: (mean.y, {"v": {n: t.sum() for n, t in x.items()}}),
            r"returned float32 \(\) for '0.weight' of variable 'v': expected float32 \(8, 4\)",
        ),
    ],
)
def test_a_server_variable_keeps_its_names_and_shapes(step, message):
    with pytest.raises(ConfigError, match=message):
        simulate(momentum(step), "sequential")


def test_a_client_variable_that_finish_leaves_out_is_named():
    own = replace(algorithms.fedavg(lr=0.1), client_init=lambda x: {"h": zeros_like(x)})
    with pytest.raises(ConfigError, match="finish returns no client variable 'h', which client_init makes"):
        simulate(own, "sequential")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda y, g, slots, lr: None, "step returned NoneType: expected a pair"),
        (lambda y, g, slots, lr: y, "step returned dict: expected a pair"),
        (lambda y, g, slots, lr: (y, {}), "step returned no variable 'm'"),
        (lambda y, g, lr: (y, {}), r"step failed: TypeError: .* called as step\(y, gradient, slots, lr\)"),
    ],
)
def test_a_custom_optimizer_is_called_before_the_run(step, message):
    own = algorithms.Optimizer("mine", lambda y: {"m": zeros_like(y)}, step)
    with pytest.raises(ConfigError, match=f"optimizer 'mine': {message}"):
        simulate(algorithms.fedavg(lr=0.1, optimizer=own), "sequential")


def test_a_custom_optimizer_can_use_the_arithmetic_of_states_in_lanes():
    own = algorithms.Optimizer("mine", lambda y: {}, lambda y, g, slots, lr: (add(y, g, -lr), slots))
    run, _ = simulate(algorithms.fedavg(lr=0.1, optimizer=own), "batched")
    other, _ = simulate(algorithms.fedavg(lr=0.1), "batched")
    torch.testing.assert_close(run.state, other.state)


def test_per_client_that_gives_nothing_for_a_client_is_named():
    with pytest.raises(ConfigError, match="per_client gives NoneType for client 0: expected a dict"):
        simulate(algorithms.fedavg(lr=0.1, per_client=lambda client: None), "sequential")
