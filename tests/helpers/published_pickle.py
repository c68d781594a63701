"""A batch of CIFAR's python version in its publisher's form: Python 2's cPickle, protocol 2, numpy 1's names."""

import struct

import numpy as np

ARRAY = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\tU\x01bq\n\x87Rq\x0b"
BYTES = (
    b"cnumpy\ndtype\nq\rU\x02u1q\x0eK\x00K\x01\x87q\x0fRq\x10(K\x03U\x01|q\x11NNN" + b"J\xff\xff\xff\xff" * 2
)


def as_published(pixels: np.ndarray, labels: list[int], fortran: bool = False) -> bytes:
    """Text and bytes are both strings there, and labels are single bytes."""
    rows, columns = pixels.shape
    content = pixels.tobytes("F" if fortran else "C")
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(",
            *(b"K" + bytes([label]) for label in labels),
            b"eU\x04dataq\x06" + ARRAY + struct.pack("<3scHcH", b"(K\x01", b"M", rows, b"M", columns),
            b"\x86q\x0c" + BYTES + b"K\x00tb" + (b"\x88" if fortran else b"\x89"),
            b"T" + struct.pack("<i", len(content)) + content + b"tbU\tfilenamesq\x12]q\x13(",
            *(b"U\x05a.png" for _ in labels),
            b"eu.",
        ]
    )
