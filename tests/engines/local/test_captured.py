"""Recorded steps give the bits of steps that run, and what cannot be replayed is not.

`Tape` stands in for CUDA graphs: a replay repeats torch's operations on the recorded tensors, without Python.
"""

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from captured_rounds import METHODS, UNCAPTURED, PerSize, SetsUp, assert_same, images, network, played
from tape import Tape
from torch import nn

import fedpara as fp
from fedpara import algorithms, models, privacy
from fedpara.algorithms import Optimizer
from fedpara.engines.local import captured
from fedpara.engines.local.host_state import attributes, changed
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import make_program


def made(build):
    torch.manual_seed(0)
    return build()


def both(build, method, **options):
    """The same rounds with steps that run and with replays, and the recorder."""
    tape = Tape()
    plain = played(made(build), method, None, **options)
    return plain, played(made(build), method, tape, **options), tape


@pytest.mark.parametrize("method", METHODS)
def test_replays_give_the_bits_of_steps(method):
    plain, replayed, tape = both(network, METHODS[method]())
    trainings = 2 if method == "ditto" else 1
    assert tape.recorded == replayed[2].worker.captured.recorded == 3 * trainings  # batches of 4, 3 and 1
    assert tape.replayed > tape.warmed
    assert replayed[2].why.endswith("on the CPU, captured")
    assert_same(plain, replayed)


@pytest.mark.parametrize("scheme", [fp.FedPara(gamma=0.3), fp.PFedPara(gamma=0.3)])
def test_factors_and_private_factors_are_replayed(scheme):
    plain, replayed, tape = both(lambda: fp.factorize(network(), scheme, force=True), METHODS["sgd"]())
    assert tape.replayed
    assert_same(plain, replayed)


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
@pytest.mark.parametrize("batch_size", [5, 64])
def test_batch_norm_and_augmentation(batch_size, augment):
    def build():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))

    method = algorithms.fedavg(lr=0.05, batch_size=batch_size, epochs=3)
    plain, replayed, tape = both(build, method, augment=augment)
    assert tape.replayed
    assert_same(plain, replayed)
    assert any(name.endswith("num_batches_tracked") for name in plain[0][-1].progress.buffers)


def test_float64_and_random_layers():
    def build():
        layers = [nn.Flatten(), nn.Linear(192, 8), nn.RReLU(), nn.AlphaDropout(0.3), nn.Linear(8, 5)]
        return nn.Sequential(*layers).double()

    plain, replayed, tape = both(build, METHODS["adamw"](), examples=images(dtype=torch.float64))
    assert tape.replayed
    assert_same(plain, replayed)


def test_trees_of_inputs_and_targets():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Embedding(7, 3)

        def forward(self, ids, numbers):
            return {"y": self.a(numbers) + self.b(ids).mean(1)}

    generator = torch.Generator().manual_seed(0)
    numbers, ids = torch.randn(44, 4, generator=generator), torch.randint(0, 7, (44, 5), generator=generator)
    held = fp.data.Examples({"ids": ids, "numbers": numbers}, (numbers[:, :3], numbers[:, 0]))

    def loss(output, target):
        return (output["y"] - target[0]).square().mean(1) + target[1].abs()

    tape, ways, method = Tape(), [], METHODS["sgd"]()
    for recorder in (None, tape):
        model = made(Two)
        worker = Worker(make_program(model), fp.Task(model, loss=loss), recorder=recorder)
        state = {name: tensor.clone() for name, tensor in worker.program.initial.items()}
        given = {"seed": 0, "round": 1}
        ways.append([worker.train(state, held, method, state, {}, {}, who=who, **given) for who in range(2)])
    assert tape.replayed
    for a, b in zip(*ways, strict=True):
        assert a.loss == b.loss
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)


def test_rotation_reads_the_turn_of_the_round():
    def build():
        return fp.factorize(network(), fp.FedPara(gamma=0.3), force=True)

    plain, replayed, tape = both(build, METHODS["sgd"](), rotate=True)
    assert tape.replayed
    assert_same(plain, replayed)


@pytest.mark.parametrize("build", UNCAPTURED)
def test_what_a_replay_would_lose_trains_step_by_step(build):
    tape, runs = Tape(), []
    for recorder in (None, tape):
        random.seed(0)
        np.random.seed(0)
        runs.append(played(made(build), METHODS["sgd"](), recorder))
    assert not tape.replayed
    assert not runs[1][2].worker.captured.recorded
    assert "not captured: " in runs[1][2].why
    assert UNCAPTURED[build] in runs[1][2].why
    assert_same(*runs)


@pytest.mark.parametrize("build", [SetsUp, PerSize])
def test_what_is_built_once_is_replayed(build):
    plain, replayed, tape = both(build, METHODS["sgd"]())
    assert tape.replayed > tape.warmed
    assert "not captured" not in replayed[2].why
    assert_same(plain, replayed)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 5)

    def forward(self, x):
        return self.out(self.embed((x.flatten(1)[:, :6].abs() * 2).long().clamp(max=8)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.LSTM(8, 6, 2, dropout=0.2, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.out(self.cells(x[:, 0])[0][:, -1])


@pytest.mark.parametrize(
    ("build", "method", "options", "said"),
    [
        (Rows, {}, {}, "embed has sparse gradients"),
        (Recurrent, {}, {}, "cells is a recurrent layer with dropout"),
        (
            lambda: fp.factorize(network(), fp.FedPara(gamma=0.3), force=True),
            {"jacobian": 1.0},
            {},
            "the Jacobian correction",
        ),
        (network, {}, {"privacy": privacy.Example(1.0, 1.0), "privacy_seed": 0}, "example-level privacy"),
    ],
)
def test_what_is_known_not_to_be_captured(build, method, options, said):
    plain, replayed, tape = both(
        build, algorithms.fedavg(lr=0.05, batch_size=4, **method), rounds=2, **options
    )
    assert tape.warmed == tape.recorded == 0
    assert f"not captured: {said}" in replayed[2].why
    assert_same(plain, replayed)


class Annealed:
    """A loss that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return nn.functional.cross_entropy(output, target, reduction="none") / self.calls

    def method(self, output, target):
        return self(output, target)


def annealed():
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(output, target, reduction="none") / calls

    return loss


LOSSES = {"object": Annealed, "method": lambda: Annealed().method, "closure": annealed}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_with_a_state_is_not_captured(kind):
    model = made(network)
    worker = Worker(make_program(model), fp.Task(model, loss=LOSSES[kind]()), recorder=Tape())
    state = {name: tensor.clone() for name, tensor in worker.program.initial.items()}
    worker.train(state, images(), METHODS["sgd"](), state, {}, {}, seed=0, round=1, who=0)
    assert worker.captured.notes == ["not captured: a step sets the loss.calls"]


def test_hooks_are_called_in_every_step():
    model, calls = made(network), []
    model[0].register_forward_hook(lambda *given: calls.append(1))
    run = played(model, METHODS["sgd"](), tape := Tape())
    assert run[2].why.endswith("not captured: 0 has hooks")
    assert not tape.recorded


def test_narrow_parameters_are_not_captured():
    model = made(lambda: models.mlp(4, 4, 2)).bfloat16()
    assert captured.uncapturable(model, dict(model.named_parameters())) == "fc1.weight is bfloat16"


@pytest.mark.parametrize("when", [1, 5])
def test_an_optimizer_with_other_slots_than_its_first(when):
    def step(y, g, slots, lr):
        k = len(slots) + 1
        more = {f"{k}": {name: t.clone() for name, t in g.items()}} if k >= when else {}
        return {name: t - lr * g[name] for name, t in y.items()}, {**slots, **more}

    method = algorithms.fedavg(lr=0.05, batch_size=4, optimizer=Optimizer("more", lambda y: {}, step))
    plain, replayed, tape = both(network, method)
    if when == 1:
        assert "the optimizer's step returns other slots than its init" in replayed[2].why
        assert not tape.recorded
    assert_same(plain, replayed)


def test_a_few_steps_are_not_recorded():
    method = algorithms.fedavg(lr=0.05, batch_size=64, steps=1)
    replayed = played(made(network), method, tape := Tape(), rounds=1)
    assert (tape.recorded, tape.replayed) == (0, 0)
    assert replayed[2].why.endswith("on the CPU")


def test_only_so_many_shapes_are_recorded(monkeypatch):
    monkeypatch.setattr(captured, "GRAPHS", 2)
    plain, replayed, tape = both(network, METHODS["sgd"]())
    assert tape.recorded == 2
    assert "not captured: batches of other shapes than the first 2" in replayed[2].why
    assert_same(plain, replayed)


def test_a_recording_that_fails_in_the_end_frees_the_others():
    class Full(Tape):
        def record(self, step):
            if self.recorded:
                raise torch.OutOfMemoryError("no room")
            return super().record(step)

    plain = played(made(network), METHODS["sgd"](), None)
    replayed = played(made(network), METHODS["sgd"](), tape := Full())
    assert tape.replayed
    assert replayed[2].why.endswith("on the CPU; not captured: OutOfMemoryError: no room")
    assert not replayed[2].worker.captured._fixed
    assert_same(plain, replayed)


def test_attributes_count_by_value_and_tensors_by_identity():
    module = nn.Module()
    module.number, module.tensor, module.parts = float("nan"), torch.zeros(2), [1, {"a": (2,)}]
    module.child = nn.Linear(2, 2)
    first = attributes(module.named_modules())
    assert changed(first, attributes(module.named_modules())) == ""
    module.tensor.add_(1)  # a graph reads it at its address
    assert changed(first, attributes(module.named_modules())) == ""
    module.parts[1]["a"] = (3,)
    assert changed(first, attributes(module.named_modules())) == "parts.1.a.0"
    module.parts[1]["a"] = (2,)
    module.array = np.zeros(2)
    first = attributes(module.named_modules())
    module.array[1] = 1
    assert changed(first, attributes(module.named_modules())) == "array"
    module.array[1] = 0
    module.child.weight = nn.Parameter(module.child.weight.detach())
    assert changed(first, attributes(module.named_modules())) == "child.weight"


def test_a_worker_that_is_dropped_is_freed_at_once():
    """Its graphs hold GPU memory, so it must not wait for the garbage collector."""
    model, tape = made(network), Tape()
    worker = Worker(make_program(model), fp.Task(model), recorder=tape)
    state = {name: tensor.clone() for name, tensor in worker.program.initial.items()}
    worker.train(state, images(), METHODS["sgd"](), state, {}, {}, seed=0, round=1, who=0)
    assert tape.replayed
    gone = weakref.ref(worker), weakref.ref(worker.captured)
    gc.disable()
    try:
        del worker
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()
