"""Unpickling of arrays in plain containers, and of nothing else.

A pickle is a program. This one may rebuild numpy arrays, dicts, lists, tuples, strings and numbers; any other
name it asks for is refused before it is looked up.
"""

import io
import pickle
from typing import Any

import numpy as np

from fedpara.errors import DataError


def _latin1(text: str, encoding: str) -> bytes:
    """What `_codecs.encode` is called for in pickles of protocol 2: bytes written as latin-1 text."""
    if encoding != "latin1":
        raise DataError(f"encoding {encoding!r} in a pickle: expected 'latin1'.")
    return text.encode("latin1")


_multiarray = np.empty(0).__reduce__()[0]
_ADMITTED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _multiarray,
    ("numpy._core.multiarray", "_reconstruct"): _multiarray,
    ("_codecs", "encode"): _latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise DataError(
                f"it asks for {module}.{name}: refused, only arrays and plain containers are read"
            ) from None


def loads(content: bytes, where: str) -> Any:
    """The object in `content`; a damaged or unwelcome pickle raises DataError naming `where`."""
    try:
        return _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except DataError as error:
        raise DataError(f"{where}: {error}. Take the file from its publisher again.") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{where} is damaged: {len(content):,} bytes that are not a whole pickle ({error}). "
            "Take the file from its publisher again."
        ) from None
