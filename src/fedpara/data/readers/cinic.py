"""CINIC-10's image folders: {train,valid,test}/<class>/*.png, 90,000 images of 32 x 32 pixels each.

`train` is for training and `test` for testing, as in the paper; `valid` is not read. The cache watches the class
folders, not the 180,000 files: it notices an added or removed file, but not one that is rewritten in place.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedpara.data.sources import Array, Arrays, Finding, Layout, Source, images, reading
from fedpara.errors import DataError, MissingExtraError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _layout(place: str) -> Layout:
    def find(root: Path) -> Finding:
        names = [f"{part}/{kind}" for part in ("train", "test") for kind in CLASSES]
        files = tuple(root / place / name for name in names if (root / place / name).is_dir())
        return Finding(files, tuple(name for name in names if root / place / name not in files))

    return Layout(place, f"{place}/{{train,test}}/{{airplane,...,truck}}/*.png", find, _read)


def _read(folders: Sequence[Path]) -> Arrays:
    return images(_part(folders[: len(CLASSES)]), _part(folders[len(CLASSES) :]))


def _part(folders: Sequence[Path]) -> tuple[Array, Array]:
    files = [(path, label) for label, folder in enumerate(folders) for path in sorted(folder.glob("*.png"))]
    if not files:
        raise DataError(f"{folders[0].parent} has no images: expected *.png files in its class folders.")
    inputs = np.empty((len(files), 3, 32, 32), np.uint8)
    for row, (path, _) in enumerate(files):
        inputs[row] = _pixels(path)
    return inputs, np.array([label for _, label in files])


def _pixels(path: Path) -> Array:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("CINIC-10's images need Pillow: pip install pillow") from None
    with reading(path), Image.open(path) as image:
        if image.size != (32, 32):
            raise ValueError(f"{image.width} x {image.height} pixels: expected 32 x 32")
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


CINIC10 = Source(
    "cinic10",
    10,
    "https://datashare.ed.ac.uk/handle/10283/3192",
    tuple(map(_layout, ("CINIC-10", "cinic-10", "cinic10"))),
    (90_000, 90_000),
)
