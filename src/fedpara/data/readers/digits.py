"""scikit-learn's digits: 1,797 images of 8 x 8 pixels in 17 grey levels, part of its package. No download is needed.

`sklearn.datasets.load_digits` reads the same file, but takes two seconds to import.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedpara.data.examples import Examples
from fedpara.data.partition import Partition, split
from fedpara.data.sources import build_images, images
from fedpara.errors import MissingExtraError

CLASSES = 10
TEST_FRACTION = 0.2
SPLIT_SEED = 0


def file() -> Path:
    """digits.csv.gz of the installed scikit-learn."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise MissingExtraError("digits is part of scikit-learn: pip install scikit-learn")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def load() -> tuple[Examples, Examples]:
    """(train, test) uint8 [N, 1, 8, 8]: a fixed split, 80/20 of every class, in the file's order."""
    with gzip.open(file(), "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")  # 64 pixels and a label per row
    pixels = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, 64].astype(np.int64)
    everything = Partition.of([range(len(labels))])
    (train,), (test,) = split(everything, labels, TEST_FRACTION, SPLIT_SEED)
    return build_images(images((pixels[train], labels[train]), (pixels[test], labels[test])), CLASSES)
