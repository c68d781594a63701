"""Contract: each option of local training has exactly its documented effect, in every engine."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedpara as fp
from fedpara.data import normalise
from fedpara.errors import ConfigError
from fedpara.parameterization import corrected_grad, forms
from fedpara.state import norm, subtract


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def one_step(world, engine, scheme="fedpara", **fields):
    """One client, one step, always on the same batch: the effect of an option fits on one line."""
    federation = fp.FederatedData(world.train, [range(12)])
    run = world.simulate(
        world.model(scheme),
        world.algorithm(**{"batch_size": 12, **fields}),
        federation=federation,
        rounds=1,
        cohort=1,
        engine=engine,
    )
    return run.session.program.initial, run.state


def test_the_jacobian_correction_changes_only_the_factors(world, engine):
    x, plain = one_step(world, engine)
    _, corrected = one_step(world, engine, jacobian=1.0)
    factors = {name for name in x if name.startswith("fc1.weight.")}
    assert len(factors) == 4
    for name in x:
        assert torch.equal(plain[name], corrected[name]) == (name not in factors), name

    model = world.model("fedpara")
    merged = fp.merge(model)
    examples = world.train.subset(range(12))
    images = normalise(examples.inputs, examples.mean, examples.std)

    def loss(state):
        return cross_entropy(torch.func.functional_call(merged, state, (images,)), examples.targets)

    gradient, _ = corrected_grad(loss, x, forms(model), eta=0.05, lambda_=1.0)
    for name in x:
        torch.testing.assert_close(corrected[name], x[name] - 0.05 * gradient[name], rtol=0, atol=1e-6)


def test_the_jacobian_correction_needs_factors(world):
    with pytest.raises(ConfigError, match="needs factorized weights"):
        world.simulate(world.model("original"), world.algorithm(jacobian=1.0))


def test_weight_decay_shrinks_the_weights_by_its_share(world, engine):
    x, plain = one_step(world, engine)
    _, decayed = one_step(world, engine, weight_decay=0.5)
    for name in x:
        torch.testing.assert_close(decayed[name], plain[name] - 0.05 * 0.5 * x[name], rtol=0, atol=1e-6)


def test_clipping_bounds_the_step(world, engine):
    x, plain = one_step(world, engine)
    _, clipped = one_step(world, engine, clip=0.01)
    _, loose = one_step(world, engine, clip=1e6)
    assert norm(subtract(plain, x)) > 0.05 * 0.01
    assert norm(subtract(clipped, x)) == pytest.approx(0.05 * 0.01, rel=1e-3)
    assert same(loose, plain)


def test_momentum_needs_a_second_step(world, engine):
    _, plain = one_step(world, engine)
    x, first = one_step(world, engine, momentum=0.9)
    assert same(plain, first)
    _, two = one_step(world, engine, epochs=2)
    _, two_with = one_step(world, engine, epochs=2, momentum=0.9)
    push = subtract(two_with, two)
    for name in x:  # the second step repeats 0.9 of the first
        torch.testing.assert_close(push[name], 0.9 * (first[name] - x[name]), rtol=0, atol=1e-6)


def test_the_learning_rate_decays_per_round(world, engine):
    federation = fp.FederatedData(world.train, [range(12)])
    steady, decayed = (
        world.simulate(
            world.model(),
            world.algorithm(batch_size=12, lr_decay=decay),
            federation=federation,
            rounds=2,
            cohort=1,
            engine=engine,
        ).state
        for decay in (1.0, 0.5)
    )
    _, first = one_step(world, engine, "original")
    for name in first:
        torch.testing.assert_close(
            decayed[name] - first[name], 0.5 * (steady[name] - first[name]), rtol=0, atol=1e-6
        )


def test_steps_replace_epochs(world, engine):
    _, epochs = one_step(world, engine, epochs=3, batch_size=5)
    _, steps = one_step(world, engine, epochs=None, steps=9, batch_size=5)
    _, fewer = one_step(world, engine, epochs=None, steps=8, batch_size=5)
    assert same(epochs, steps)
    assert not same(epochs, fewer)


def test_augmentation_draws_new_values_for_every_client_and_round(world, engine):
    def state(augment):
        task = fp.Task(world.model(), test=world.test, augment=augment)
        return fp.simulate(task, world.federation, world.algorithm(), rounds=2, cohort=3, engine=engine).state

    assert same(state("crop-flip"), state("crop-flip"))
    assert not same(state("crop-flip"), state("none"))


def test_crop_flip_needs_images(world):
    words = replace(world.train, inputs=torch.zeros(len(world.train), 80).long(), mean=None, std=None)
    with pytest.raises(ConfigError, match="needs images"):
        fp.simulate(
            fp.Task(world.model(), augment="crop-flip"),
            fp.FederatedData(words, world.clients),
            world.algorithm(),
            rounds=1,
            cohort=1,
        )
