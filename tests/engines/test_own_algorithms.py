"""Algorithms that a user makes of ours: what they keep is kept by every engine, or refused before the run."""

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
    """`base`, and each client counts its rounds."""

    def first(x):
        return {**base.client_init(x), **({"count": {"rounds": torch.zeros(())}} if begin else {})}

    def finish(x, y, down, client, steps, eta):
        sent, kept = base.finish(x, y, down, client, steps, eta)
        before = client.get("count", {}).get("rounds", torch.zeros(()))
        return sent, {**kept, "count": {"rounds": before + 1}}

    return replace(base, client_init=first, finish=finish)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "feddyn", "scaffold"])
def test_a_group_of_ones_own_goes_along(name, engine):
    base = algorithms.build(name, algorithms.Local(lr=0.1, batch_size=5))
    plain, _ = simulate(base, engine)
    counted, memory = simulate(counting(base), engine)
    assert [float(memory.get(client)["count"]["rounds"]) for client in range(6)] == [4.0] * 6
    assert all(torch.equal(counted.state[n], t) for n, t in plain.state.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_kept_without_a_beginning_is_refused(engine):
    base = algorithms.fedavg(lr=0.1, batch_size=5)
    with pytest.raises(
        ConfigError, match=r"finish returns client variables with other names than client_init"
    ):
        simulate(counting(base, begin=False), engine)


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_a_narrow_model_keeps_narrow_variables_in_both_engines(name):
    algorithm = algorithms.build(name, algorithms.Local(lr=0.05, batch_size=5))
    (a, _), (b, memory) = (simulate(algorithm, engine, torch.bfloat16) for engine in ENGINES)
    kept = {t.dtype for group in memory.get(0).values() for t in group.values()}
    assert kept == {torch.bfloat16}
    for key, tensor in a.state.items():
        torch.testing.assert_close(b.state[key], tensor, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", ["private", ""])
def test_a_group_cannot_be_called_as_the_models_own(name):
    mine = replace(
        algorithms.fedavg(lr=0.1),
        client_init=lambda x: {name: {n: torch.zeros_like(t) for n, t in x.items()}},
    )
    with pytest.raises(ConfigError, match=f"names a variable '{name}', which is reserved"):
        simulate(mine, "sequential")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("spoil", "said"),
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
        (lambda x, server: (x, {"rounds": 3}), "returned dict: expected a dict of states"),
    ],
)
def test_what_is_no_model_like_x_is_refused_in_its_round(spoil, said, engine):
    base = algorithms.fedavg(lr=0.1, batch_size=5)
    own = replace(base, name="own", aggregate=lambda *given: spoil(*base.aggregate(*given)))
    with pytest.raises(ConfigError, match=re.escape(f"algorithm 'own': aggregate {said}")):
        fp.simulate(fp.Task(network()), federation(), own, rounds=1, cohort=6, engine=engine)


def test_the_mark_is_of_the_function_itself():
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
    assert not marked(own), "a mark on a partial is the partial's"
    algorithms.on_any_device(own)
    assert marked(own)
    assert marked(partial(partial(own, scale=2), scale=3))
    assert marked(algorithms.on_any_device(Method().aggregate))
    assert marked(Method().aggregate), "of every instance"


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_that_runs_out_in_the_servers_part_ends_the_run_with_a_cure(engine):
    def aggregate(*_):
        raise torch.OutOfMemoryError("no room")

    own = replace(algorithms.fedavg(lr=0.1), aggregate=aggregate)
    with pytest.raises(RunError, match=r"round 1: the device is out of memory .* Use a smaller batch"):
        simulate(own, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("correct", "said"),
    [
        (lambda g: None, "returned nothing for '0.weight': expected float32 (8, 4)"),
        (lambda g: {}, "returned nothing for '0.weight': expected float32 (8, 4)"),
        (lambda g: {f"model.{n}": t for n, t in g.items()}, "returned nothing for '0.weight'"),
        (lambda g: {n: t.sum() for n, t in g.items()}, "returned float32 () for '0.weight'"),
        (lambda g: {n: t.double() for n, t in g.items()}, "returned float64 (8, 4) for '0.weight'"),
    ],
    ids=["nothing", "empty", "misspelt", "sums", "wider"],
)
def test_what_is_no_gradient_is_refused_before_the_first_round(correct, said, engine):
    own = replace(algorithms.fedavg(lr=0.1), name="own", correct=lambda g, *_: correct(g))
    with pytest.raises(ConfigError, match=re.escape(f"algorithm 'own': correct {said}")):
        simulate(own, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("function", "made", "said"),
    [
        ("server_init", None, "returned NoneType: expected a dict of states"),
        ("broadcast", {"h": 1.0}, "returned dict: expected a dict of states"),
        ("client_init", [], "returned list: expected a dict of states"),
        ("finish", {}, "returned dict: expected a pair of dicts"),
        ("finish", ({}, {}, {}), "returned tuple: expected a pair of dicts"),
        ("finish", (None, {}), "returned NoneType: expected a dict of states"),
    ],
)
def test_what_are_no_groups_is_refused_before_the_first_round(function, made, said, engine):
    own = replace(algorithms.fedavg(lr=0.1), name="own", **{function: lambda *_: made})
    with pytest.raises(ConfigError, match=re.escape(f"algorithm 'own': {function} {said}")):
        simulate(own, engine)


def test_both_functions_need_the_mark():
    base = algorithms.fedavg(lr=0.1)
    assert not replace(base, finish=lambda *given: base.finish(*given)).on_any_device
