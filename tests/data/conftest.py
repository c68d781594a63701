"""Small files in the publishers' formats."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def write_idx() -> Callable[..., dict[str, np.ndarray]]:
    """Writes the four idx files of an MNIST-like set into a folder and returns their arrays."""

    def write(folder: Path, train: int = 6, test: int = 4, packed: bool = False, seed: int = 0):
        rng = np.random.default_rng(seed)
        arrays = {
            "train-images-idx3-ubyte": rng.integers(0, 256, (train, 5, 4), dtype=np.uint8),
            "train-labels-idx1-ubyte": rng.integers(0, 10, train, dtype=np.uint8),
            "t10k-images-idx3-ubyte": rng.integers(0, 256, (test, 5, 4), dtype=np.uint8),
            "t10k-labels-idx1-ubyte": rng.integers(0, 10, test, dtype=np.uint8),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            content = idx_bytes(array)
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
        return arrays

    return write
