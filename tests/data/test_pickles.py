"""A publisher's pickle is parsed and never unpickled; crafted pickles are rejected."""

import pickle
import struct
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_pickle import ARRAY, as_published

from fedpara.data.readers import cifar, pickles
from fedpara.errors import DataError


@pytest.mark.parametrize("fortran", [False, True])
def test_the_publishers_pickle_is_read(fortran):
    pixels = np.random.default_rng(0).integers(0, 256, (300, 3072), dtype=np.uint8)
    labels = [*range(10)] * 30
    content = as_published(pixels, labels, fortran)
    inputs, found = cifar.CIFAR10_PYTHON.decode(content, 300, "data_batch_1")
    assert inputs.shape == (300, 3, 32, 32)
    assert np.array_equal(inputs.reshape(300, 3072), pixels)
    assert found.tolist() == labels
    batch = pickles.loads(content, "data_batch_1")
    assert batch["batch_label"] == "training batch 1 of 5"
    assert batch["filenames"] == ["a.png"] * 300


def short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def dtype(kind: bytes, state: bytes = b"") -> bytes:
    return b"cnumpy\ndtype\n" + short(kind) + b"K\x00K\x01\x87R" + state


OBJECTS_FAR_AWAY = dtype(
    b"V8",
    # one field: an object, 2**40 bytes past the start of an item of 8 bytes, with every flag set
    b"(K\x03U\x01|NU\x01a\x85}U\x01a"
    + dtype(b"O8")
    + number(1 << 40)
    + b"\x86s"
    # its size, alignment and flags
    + number(8)
    + number(1)
    + number(0x3F)
    + b"tb",
)
CRAFTED = (
    b"\x80\x02}U\x04data"
    + ARRAY
    + b"(K\x01K\x04\x85"
    + OBJECTS_FAR_AWAY
    + b"\x89]("
    + b"U\x01x" * 4
    + b"etbs."
)


@pytest.fixture
def hostile(tmp_path):
    """A CIFAR-10 folder of crafted batches."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in cifar.CIFAR10_PYTHON.names:
        (folder / name).write_bytes(CRAFTED)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("data", "verify", "cifar10"),
        ("data", "prepare", "cifar10"),
        ("run", "--dataset", "cifar10", "--model", "mlp", "--scheme", "original", "--out", "{}/run"),
    ],
    ids=["verify", "prepare", "run"],
)
def test_a_crafted_pickle_is_rejected_with_a_message(hostile, words):
    """Unpickling it crashes the process inside NumPy (SIGSEGV)."""
    said = [word.format(hostile) for word in words]
    command = [sys.executable, "-m", "fedpara", *said, "--data-dir", str(hostile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "data_batch_1" in line and "MD5" not in line]
    assert "Download the file again from its publisher." in line
    assert not (hostile / "run").exists()


NESTED = """
from fedpara.data.readers import pickles
from fedpara.errors import DataError
try:
    pickles.loads(b"\\x80\\x02})" + b"\\x85" * 1_000_000 + b"Ns.", "batch")
except DataError as error:
    print(error)
"""


def test_a_key_of_a_million_tuples_is_rejected():
    """Its hash overflows the C stack (SIGSEGV)."""
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert "batch is damaged" in done.stdout


def test_a_crafted_type_is_rejected():
    content = as_published(np.zeros((2, 3), np.uint8), [1, 2])
    for changed in (
        content.replace(b"U\x02u1", b"U\x02O8"),
        content.replace(b"K\x00tb\x89", b"K\x3ftb\x89"),
        content.replace(b"M\x02\x00M\x03\x00", b"M\x02\x00M\x04\x00"),
        content.replace(b"T\x06\x00\x00\x00" + bytes(6), b"]"),
    ):
        assert changed != content
        with pytest.raises(DataError, match="batch"):
            pickles.loads(changed, "batch")


@given(st.data())
def test_a_changed_byte_gives_a_value_or_a_data_error(data):
    """Property, for any bytes that are changed."""
    content = bytearray(as_published(np.arange(6, dtype=np.uint8).reshape(2, 3), [1, 2]))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DataError):
        pickles.loads(bytes(content), "batch")


def test_other_operations_are_rejected_by_name():
    with pytest.raises(DataError, match="it uses the operation EMPTY_SET: expected only"):
        pickles.loads(pickle.dumps({1, 2}, 4), "batch")
    with pytest.raises(DataError, match=r"it asks for collections\.OrderedDict: expected only"):
        pickles.loads(b"ccollections\nOrderedDict\n)R.", "batch")
