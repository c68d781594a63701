"""Contracts of every algorithm: types, purity, equal bits, vmap, compile, empty states."""

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from fedpara import algorithms
from fedpara.algorithms import Algorithm, Local, Update, Variables, Visit, clip_by_norm, sgd
from fedpara.errors import StateError
from fedpara.state import State

SHAPES: dict[str, tuple[int, ...]] = {"conv.weight.x1": (4, 3), "conv.bias": (4,), "scale": ()}
N = 10

every = pytest.mark.parametrize("name", algorithms.names())


def drawn(seed: int, dtype: torch.dtype = torch.float32, *stack: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((*stack, *shape), generator=generator, dtype=dtype)
        for name, shape in SHAPES.items()
    }


def like(variables: Variables, seed: int, dtype: torch.dtype = torch.float32, *stack: int) -> Variables:
    """The same variables with random values: zeros would hide a wrong sign. A path length stays as it is."""
    filled = {
        variable: state if variable == "path" else drawn(seed + i, dtype, *stack)
        for i, (variable, state) in enumerate(variables.items())
    }
    return {g: {n: t.abs() if g == "v" else t for n, t in members.items()} for g, members in filled.items()}


def build(name: str) -> Algorithm:
    return algorithms.build(name, Local(lr=0.05))


class Scene:
    """One call of every function of an algorithm, on random inputs."""

    def __init__(self, algorithm: Algorithm, dtype: torch.dtype = torch.float32) -> None:
        x = drawn(0, dtype)
        self.x, self.gradient, self.ys = x, drawn(1, dtype), [drawn(seed, dtype) for seed in (2, 3)]
        self.server = like(algorithm.server_init(x), 10, dtype)
        self.client = like(algorithm.client_init(x), 20, dtype)
        self.down = algorithm.broadcast(self.server)
        up = algorithm.finish(x, self.ys[0], self.down, self.client, 7, 0.05)[0]
        self.updates = [Update(y, like(up, 30 + i, dtype), 3 + i) for i, y in enumerate(self.ys)]

    def calls(self, algorithm: Algorithm) -> dict[str, Callable[[], tuple[State | Variables, ...]]]:
        x, y, down, client = self.x, self.ys[0], self.down, self.client
        return {
            "server_init": lambda: (algorithm.server_init(x),),
            "broadcast": lambda: (algorithm.broadcast(self.server),),
            "client_init": lambda: (algorithm.client_init(x),),
            "correct": lambda: (algorithm.correct(self.gradient, y, x, down, client),),
            "send": lambda: (algorithm.send(x, y, Visit(3, 2, 7, 0.1, 11)),),
            "finish": lambda: algorithm.finish(x, y, down, client, 7, 0.05),
            "aggregate": lambda: algorithm.aggregate(x, self.server, self.updates, N),
        }

    def inputs(self) -> Iterator[Tensor]:
        yield from tensors((self.x, self.gradient, *self.ys, self.server, self.client, self.down))
        for update in self.updates:
            yield from tensors((update.y, update.extra))


def states(values: tuple[State | Variables, ...]) -> Iterator[State]:
    for value in values:
        if any(isinstance(member, dict) for member in value.values()):
            yield from value.values()  # type: ignore[misc]
        elif value:
            yield value  # type: ignore[misc]


def tensors(values: tuple[State | Variables, ...]) -> Iterator[Tensor]:
    for state in states(values):
        yield from state.values()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_names_shapes_and_types_are_those_of_x(name: str, dtype: torch.dtype) -> None:
    algorithm = build(name)
    scene = Scene(algorithm, dtype)
    for function, call in scene.calls(algorithm).items():
        for state in states(call()):
            if list(state) == ["length"]:  # FedNova sends one number beside its model
                assert state["length"].shape == (), function
                continue
            assert list(state) == list(SHAPES), function
            for key, tensor in state.items():
                assert (tensor.shape, tensor.dtype) == (SHAPES[key], dtype), (function, key)


@every
def test_variables_keep_their_names(name: str) -> None:
    algorithm = build(name)
    scene = Scene(algorithm)
    up, client = algorithm.finish(scene.x, scene.ys[0], scene.down, scene.client, 7, 0.05)
    _, server = algorithm.aggregate(scene.x, scene.server, scene.updates, N)
    assert client.keys() == algorithm.client_init(scene.x).keys()
    assert server.keys() == algorithm.server_init(scene.x).keys()
    assert up.keys() <= {"control", "path"}
    assert scene.down.keys() == up.keys() - {"path"}


@every
def test_inputs_are_not_modified(name: str) -> None:
    algorithm = build(name)
    scene = Scene(algorithm)
    before = [tensor.clone() for tensor in scene.inputs()]
    for function, call in scene.calls(algorithm).items():
        call()
        for tensor, copy in zip(scene.inputs(), before, strict=True):
            assert torch.equal(tensor, copy), function


@every
def test_two_calls_give_equal_bits(name: str) -> None:
    algorithm = build(name)
    for function, call in Scene(algorithm).calls(algorithm).items():
        first, second = list(tensors(call())), list(tensors(call()))
        assert len(first) == len(second), function
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), function


@every
def test_empty_states(name: str) -> None:
    """A model may share nothing, and a message does not carry empty variables: extra and down are {}."""
    algorithm = build(name)
    server, client = algorithm.server_init({}), algorithm.client_init({})
    assert all(state == {} for state in (*server.values(), *client.values()))
    for down in ({}, algorithm.broadcast(server)):
        assert algorithm.correct({}, {}, {}, down, client) == {}
        up, after = algorithm.finish({}, {}, down, client, 3, 0.1)
        assert (after, up) == (client, down or up)
        for extra in ({}, up):
            x, variables = algorithm.aggregate({}, server, [Update({}, extra, 3), Update({}, extra, 1)], N)
            assert (x, variables) == ({}, server)
    assert sgd(weight_decay=0.1).step({}, {}, {}, 0.1) == ({}, {})
    assert clip_by_norm({}, 1.0) == {}


@every
def test_correct_over_stacked_clients_equals_a_loop(name: str) -> None:
    algorithm, clients = build(name), 4
    x, down = drawn(0), like(algorithm.broadcast(algorithm.server_init(drawn(0))), 5)
    gradient, y = drawn(1, torch.float32, clients), drawn(2, torch.float32, clients)
    own = like(algorithm.client_init(x), 3, torch.float32, clients)
    stacked = vmap(algorithm.correct, in_dims=(0, 0, None, None, 0))(gradient, y, x, down, own)
    for i in range(clients):
        mine = {variable: {n: t[i] for n, t in state.items()} for variable, state in own.items()}
        one = algorithm.correct(
            {n: t[i] for n, t in gradient.items()}, {n: t[i] for n, t in y.items()}, x, down, mine
        )
        for n, tensor in one.items():
            torch.testing.assert_close(stacked[n][i], tensor, rtol=0, atol=1e-7)


@every
def test_a_step_traces_without_a_break(name: str) -> None:
    """fullgraph fails on `.item()` and on branches over values."""
    algorithm = build(name)
    optimizer = sgd(momentum=0.9, weight_decay=0.01)
    scene = Scene(algorithm)

    def step(y: State, gradient: State, velocity: State, lr: Tensor) -> tuple[State, State]:
        clipped = clip_by_norm(gradient, 0.5)
        corrected = algorithm.correct(clipped, y, scene.x, scene.down, scene.client)
        return optimizer.step(y, corrected, {"velocity": velocity}, lr)

    arguments = (scene.ys[0], scene.gradient, drawn(9), torch.tensor(0.1))
    traced = torch.compile(step, backend="eager", fullgraph=True)(*arguments)
    for a, b in zip(tensors(traced), tensors(step(*arguments)), strict=True):
        torch.testing.assert_close(a, b)


@every
def test_a_narrowed_uplink_does_not_narrow_the_server(name: str) -> None:
    """A float16 link decodes to float32, but a float64 server stays float64."""
    algorithm = build(name)
    scene = Scene(algorithm, torch.float64)
    narrow = [
        Update(
            {n: t.float() for n, t in update.y.items()},
            {g: {n: t.float() for n, t in members.items()} for g, members in update.extra.items()},
            update.examples,
        )
        for update in scene.updates
    ]
    wide = algorithm.aggregate(scene.x, scene.server, scene.updates, N)
    for a, b in zip(
        tensors(algorithm.aggregate(scene.x, scene.server, narrow, N)), tensors(wide), strict=True
    ):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every
def test_a_round_without_updates_or_with_other_names_is_rejected(name: str) -> None:
    algorithm = build(name)
    scene = Scene(algorithm)
    with pytest.raises(StateError, match="mean of 0 states"):
        algorithm.aggregate(scene.x, scene.server, [], N)
    renamed = [Update({"other": torch.zeros(1)}, update.extra, 1) for update in scene.updates]
    with pytest.raises(StateError, match="differ in names"):
        algorithm.aggregate(scene.x, scene.server, renamed, N)


@every
def test_an_algorithm_can_be_pickled(name: str) -> None:
    algorithm = build(name)
    copy = pickle.loads(pickle.dumps(algorithm))
    scene = Scene(algorithm)
    for function, call in scene.calls(algorithm).items():
        for a, b in zip(tensors(call()), tensors(scene.calls(copy)[function]()), strict=True):
            assert torch.equal(a, b), function


@pytest.mark.parametrize(
    ("name", "weighted"), [(name, name not in ("scaffold", "feddyn")) for name in algorithms.names()]
)
def test_weights(name: str, weighted: bool) -> None:
    """By examples, except for SCAFFOLD and FedDyn, whose papers use the uniform mean."""
    algorithm = build(name)
    scene = Scene(algorithm)
    heavier = [Update(u.y, u.extra, u.examples * (i + 1)) for i, u in enumerate(scene.updates)]
    a, _ = algorithm.aggregate(scene.x, scene.server, scene.updates, N)
    b, _ = algorithm.aggregate(scene.x, scene.server, heavier, N)
    assert all(torch.equal(a[n], b[n]) for n in SHAPES) is not weighted


@every
@settings(deadline=None, max_examples=20)
@given(factor=st.integers(1, 1000), counts=st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_only_the_proportions_of_examples_matter(name: str, factor: int, counts: list[int]) -> None:
    algorithm = build(name)
    scene = Scene(algorithm, torch.float64)
    extra = scene.updates[0].extra
    ys = [drawn(seed, torch.float64) for seed in range(len(counts))]
    new = [
        algorithm.aggregate(
            scene.x, scene.server, [Update(y, extra, n * k) for y, n in zip(ys, counts, strict=True)], N
        )
        for k in (1, factor)
    ]
    for a, b in zip(tensors(new[0]), tensors(new[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
