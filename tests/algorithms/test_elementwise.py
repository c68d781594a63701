"""Properties of elementwise: the same results as tensor by tensor, as neighbours in memory."""

from functools import partial, wraps

import pytest
import torch

from fedpara.algorithms import feddyn, scaffold
from fedpara.algorithms.core import no_variables
from fedpara.algorithms.elementwise import elementwise, on_blocks
from fedpara.errors import StateError
from fedpara.layout import joined, runs, separated
from fedpara.state import add, subtract


def drawn(seed, **types):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (4, 3), "a.bias": (3,), "scale": (), "none": (0, 2)}
    return {
        name: torch.randn(shape, generator=generator).to(types.get(name, torch.float32))
        for name, shape in shapes.items()
    }


def by_name(x, y, down, client, steps, eta, *, alpha=0.5):
    change = subtract(y, x)
    kept = add(add(client["h"], change, alpha), down["c"], -1.0)
    return {"sent": subtract(kept, client["h"])}, {"h": kept}


@pytest.mark.parametrize("types", [{}, {"a.bias": torch.float64, "scale": torch.float64}], ids=["one", "two"])
def test_it_equals_the_computation_by_name(types):
    x, y, c, h = (drawn(seed, **types) for seed in range(4))
    ours = elementwise(by_name)(x, y, {"c": c}, {"h": h}, 3, 0.1, alpha=0.25)
    theirs = by_name(x, y, {"c": c}, {"h": h}, 3, 0.1, alpha=0.25)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.keys() == expected.keys()
        for variable, state in expected.items():
            assert found[variable].keys() == state.keys()
            for name, tensor in state.items():
                assert found[variable][name].dtype == tensor.dtype
                assert found[variable][name].shape == tensor.shape
                torch.testing.assert_close(found[variable][name], tensor)


@pytest.mark.parametrize("types", [{}, {"a.bias": torch.float64, "scale": torch.float64}], ids=["one", "two"])
@pytest.mark.parametrize("algorithm", [scaffold(), feddyn(0.3)], ids=lambda a: a.name)
def test_blocks_give_the_same_bits(algorithm, types):
    x, y, c, own = (drawn(seed, **types) for seed in range(4))
    down = dict.fromkeys(algorithm.broadcast(algorithm.server_init(x)), c)
    client = dict.fromkeys(algorithm.client_init(x), own)
    expected = algorithm.finish(x, y, down, client, 3, 0.1)
    blocks = [{name: joined(state) for name, state in part.items()} for part in (down, client)]
    found = on_blocks(algorithm.finish)(joined(x), joined(y), *blocks, 3, 0.1)
    for part, theirs in zip(found, expected, strict=True):
        assert part.keys() == theirs.keys()
        for name, state in part.items():
            state = separated(state, x)
            assert all(torch.equal(state[n], theirs[name][n]) for n in x)


def test_only_marked_functions_compute_on_blocks():
    marked = elementwise(by_name)
    assert on_blocks(no_variables) is no_variables
    assert on_blocks(marked) is by_name
    assert on_blocks(by_name) is None
    assert on_blocks(partial(by_name, alpha=0.1)) is None
    assert on_blocks(partial(marked, alpha=0.25)).keywords == {"alpha": 0.25}

    @wraps(marked)
    def other(*given):
        return marked(*given)

    assert on_blocks(other) is None


@pytest.mark.parametrize("algorithm", [scaffold(), feddyn()], ids=lambda a: a.name)
def test_results_are_one_block_of_memory(algorithm):
    x, y = drawn(0), drawn(1)
    down = algorithm.broadcast(algorithm.server_init(x))
    sent, kept = algorithm.finish(x, y, down, algorithm.client_init(x), 3, 0.1)
    for state in (*sent.values(), *kept.values()):
        assert len(runs([state[name] for name in sorted(state)])) == 1


@pytest.mark.parametrize("algorithm", [scaffold(), feddyn()], ids=lambda a: a.name)
def test_other_names_are_rejected_and_empty_states_stay_empty(algorithm):
    x, y = drawn(0), drawn(1)
    down, own = algorithm.broadcast(algorithm.server_init(x)), algorithm.client_init(x)
    del y["scale"]
    with pytest.raises(StateError, match="differ in names: scale"):
        algorithm.finish(x, y, down, own, 3, 0.1)
    none = algorithm.broadcast(algorithm.server_init({}))
    assert not any(algorithm.finish({}, {}, none, algorithm.client_init({}), 3, 0.1)[1].values())


@pytest.mark.parametrize("algorithm", [scaffold(), feddyn()], ids=lambda a: a.name)
def test_variables_of_a_custom_algorithm_are_passed_on(algorithm):
    x, y = drawn(0), drawn(1)
    down, own = algorithm.broadcast(algorithm.server_init(x)), algorithm.client_init(x)
    more = {"count": {"rounds": torch.zeros(())}}
    plain = algorithm.finish(x, y, down, own, 3, 0.1)
    added = algorithm.finish(x, y, {**down, **more}, {**own, **more}, 3, 0.1)
    for ours, theirs in zip(added, plain, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[g][n], theirs[g][n]) for g in theirs for n in theirs[g])
