"""`hub:owner/name@revision`: an image classification set of the Hugging Face hub, loaded with `datasets`.

The revision is a commit or a tag of the set's repository. It is required because a set on the hub can change, and a
run's config must say exactly what the run was trained on.
"""

from typing import Any

import numpy as np

from fedpara.data.examples import Examples
from fedpara.data.sources import Array, build_images, images
from fedpara.errors import ConfigError, DataError, MissingExtraError, install


def load(name: str) -> tuple[Examples, Examples]:
    """(train, test) of `owner/name@revision`."""
    repository, _, revision = name.partition("@")
    if not revision:
        raise ConfigError(f"hub:{name} has no revision: append a commit or tag, as in hub:{repository}@v1.")
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"hub:{name} needs the package datasets: {install('hub')}") from None
    try:
        parts = datasets.load_dataset(repository, revision=revision)
    except Exception as error:  # the library raises a dozen classes
        raise DataError(f"hub:{name} could not be loaded: {error}") from error
    if {"train", "test"} - set(parts):
        raise DataError(f"hub:{name} has the parts {', '.join(parts)}: expected train and test.")
    return examples(parts["train"], parts["test"])


def examples(train: Any, test: Any) -> tuple[Examples, Examples]:
    """Two `datasets.Dataset`s with an Image and a ClassLabel column as (train, test)."""
    import datasets

    kinds = train.features
    image = [name for name, kind in kinds.items() if isinstance(kind, datasets.Image)]
    label = [name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    if not image or not label:
        raise DataError(f"the columns are {dict(kinds)}: expected an Image and a ClassLabel column.")
    # CIFAR-100 has a fine and a coarse label: use the finest.
    finest = max(label, key=lambda name: int(kinds[name].num_classes))
    parts = [_part(part, image[0], finest) for part in (train, test)]
    return build_images(images(*parts), int(kinds[finest].num_classes))


def _part(part: Any, image: str, label: str) -> tuple[Array, Array]:
    labels = np.asarray(part[label], dtype=np.int64)
    shape = _pixels(part[0][image]).shape
    inputs = np.empty((len(labels), *shape), np.uint8)
    for row, picture in enumerate(part[image]):
        pixels = _pixels(picture)
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise DataError(f"image {row} is {pixels.dtype} {pixels.shape}: expected uint8 {shape}.")
        inputs[row] = pixels
    return inputs, labels


def _pixels(picture: Any) -> Array:
    pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
