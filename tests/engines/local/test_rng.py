"""Properties of the random streams: batches and augmentation."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from fedpara.algorithms import Local
from fedpara.engines.local.augment import PAD, crop_flip, draw
from fedpara.engines.local.batches import batches
from fedpara.engines.rng import LayerRng, numpy_rng, torch_rng, torch_seed

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**40)
PURPOSES = ("cohort", "batches", "augment", "layers", "link-up", "link-down", "final", "lost", "devices")


def test_streams_differ_in_each_argument():
    names = [(s, p, r, c) for s in (0, 1) for p in PURPOSES for r in (1, 2) for c in (0, 1, 2)]
    assert len({tuple(numpy_rng(*name).integers(0, 2**32, 4)) for name in names}) == len(names)
    assert len({torch_seed(*name) for name in names}) == len(names)
    assert len({float(torch.rand((), generator=torch_rng(*name))) for name in names}) == len(names)


@quick
@given(seed=seeds, round=st.integers(0, 10**6), client=st.integers(0, 10**7))
def test_torch_seeds_fit_into_63_bits(seed, round, client):
    assert 0 <= torch_seed(seed, "layers", round, client) < 2**63


def test_layers_draw_from_their_own_stream_even_if_they_fail():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    try:
        with LayerRng(0, 1, 2):
            inside = torch.rand(3)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.rand(2), expected)
    with LayerRng(0, 1, 2):
        assert torch.equal(torch.rand(3), inside)
    with LayerRng(0, 1, 3):
        assert not torch.equal(torch.rand(3), inside)


@quick
@given(examples=st.integers(1, 70), batch=st.integers(1, 40), epochs=st.integers(1, 4), seed=seeds)
def test_an_epoch_sees_every_example_once(examples, batch, epochs, seed):
    local = Local(batch_size=batch, epochs=epochs)
    seen = list(batches(examples, local, np.random.default_rng(seed)))
    a_pass = -(-examples // batch)
    assert len(seen) == local.steps_for(examples) == a_pass * epochs
    for epoch in range(epochs):
        rows = seen[epoch * a_pass : (epoch + 1) * a_pass]
        assert sorted(np.concatenate(rows)) == list(range(examples))
        assert [len(row) for row in rows[:-1]] == [batch] * (a_pass - 1)


@quick
@given(examples=st.integers(1, 30), batch=st.integers(1, 40), steps=st.integers(1, 50), seed=seeds)
def test_steps_continue_over_epochs(examples, batch, steps, seed):
    by_steps = batches(examples, Local(batch_size=batch, steps=steps), np.random.default_rng(seed))
    by_epochs = batches(examples, Local(batch_size=batch, epochs=50), np.random.default_rng(seed))
    rows = list(by_steps)
    assert len(rows) == steps
    assert all(np.array_equal(a, b) for a, b in zip(rows, by_epochs, strict=False))


def test_a_client_without_examples_makes_no_step():
    assert list(batches(0, Local(steps=5), np.random.default_rng(0))) == []


@quick
@given(seed=seeds, count=st.integers(1, 6), height=st.integers(1, 9), width=st.integers(1, 9))
def test_a_crop_is_a_window_of_the_padded_image_or_of_its_mirror(seed, count, height, width):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 2, height, width, generator=generator)
    cropped = crop_flip(images, torch.from_numpy(draw(len(images), np.random.default_rng(seed))))
    assert cropped.shape == images.shape
    padded = pad(images, (PAD, PAD, PAD, PAD))
    for image, whole in zip(cropped, padded, strict=True):
        windows = [
            whole[:, top : top + height, left : left + width]
            for top in range(2 * PAD + 1)
            for left in range(2 * PAD + 1)
        ]
        assert any(torch.equal(image, w) or torch.equal(image, w.flip(2)) for w in windows)


def test_every_crop_and_mirror_occurs():
    image = torch.arange(64.0).reshape(1, 1, 8, 8) + 1
    cropped = crop_flip(image.expand(3000, 1, 8, 8), torch.from_numpy(draw(3000, np.random.default_rng(0))))
    padded = pad(image[0], (PAD, PAD, PAD, PAD))
    kinds = {
        w.flip(2).numpy().tobytes() if mirror else w.contiguous().numpy().tobytes()
        for top in range(9)
        for left in range(9)
        for mirror in (False, True)
        for w in [padded[:, top : top + 8, left : left + 8]]
    }
    found = Counter(crop.numpy().tobytes() for crop in cropped)
    assert found.keys() <= kinds
    assert len(found) > 0.99 * len(kinds)
    assert max(found.values()) < 60
