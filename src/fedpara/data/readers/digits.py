"""scikit-learn's digits, inside its wheel: 1,797 images of 8 x 8 in 17 grey levels. It needs no network.

The wheel's own file is read, which is what `sklearn.datasets.load_digits` does after two seconds of imports.
"""

import gzip
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedpara.data.examples import Examples
from fedpara.data.partition import Partition, split
from fedpara.data.sources import build_images, images
from fedpara.errors import DataError, MissingExtraError

CLASSES = 10
TEST_FRACTION = 0.2
SPLIT_SEED = 0


def file() -> Path:
    """digits.csv.gz of the scikit-learn that is installed."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            "digits comes with scikit-learn, which is not installed: pip install scikit-learn"
        )
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def load(path: Path | None = None) -> tuple[Examples, Examples]:
    """(train, test) uint8 [N, 1, 8, 8]: a fixed split, 80/20 of every class, in the file's order."""
    path = file() if path is None else path
    try:
        with gzip.open(path, "rt") as lines:
            table = np.loadtxt(lines, delimiter=",")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path}: expected scikit-learn's digits, could not be read ({error}).") from None
    if table.ndim != 2 or table.shape[1] != 65:
        raise DataError(f"{path}: expected rows of 64 pixels and a label, found {table.shape}.")
    pixels = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, 64].astype(np.int64)
    everything = Partition.of([range(len(labels))])
    (train,), (test,) = split(everything, labels, TEST_FRACTION, SPLIT_SEED)
    return build_images(images((pixels[train], labels[train]), (pixels[test], labels[test])), CLASSES)
