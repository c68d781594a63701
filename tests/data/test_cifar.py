"""Small CIFAR files: both versions, as folders and archives, damaged and malicious."""

import io
import pickle
import tarfile
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from fedpara.data import load
from fedpara.data.readers import cifar, pickles
from fedpara.data.registry import read
from fedpara.errors import DataError

RECORDS = 4


def small(version):
    return replace(
        version, train=tuple((name, RECORDS) for name, _ in version.train), test=(version.test[0], RECORDS)
    )


BINARY10, PYTHON10 = small(cifar.CIFAR10_BINARY), small(cifar.CIFAR10_PYTHON)
BINARY100, PYTHON100 = small(cifar.CIFAR100_BINARY), small(cifar.CIFAR100_PYTHON)


class Python2Pickler(pickle._Pickler):
    """Writes bytes and text as Python 2 did, which the publisher used."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, obj):
        content = obj if isinstance(obj, bytes) else obj.encode("latin1")
        self.write(pickle.BINSTRING + len(content).to_bytes(4, "little") + content)
        self.memoize(obj)

    dispatch[bytes] = save_string
    dispatch[str] = save_string


def old_pickle(batch):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(batch)
    return file.getvalue().replace(b"numpy._core.", b"numpy.core.")


def contents(version, classes, pickler=old_pickle):
    """{file name: bytes} of a version, and the images and labels in them."""
    rng = np.random.default_rng(7)
    files, truth = {}, {}
    for name in version.names:
        pixels = rng.integers(0, 256, (RECORDS, 3072), dtype=np.uint8)
        labels = rng.integers(0, classes, RECORDS, dtype=np.uint8)
        coarse = [np.full((RECORDS, 1), 19, np.uint8)] if classes == 100 else []
        if name.endswith(".bin"):
            files[name] = np.concatenate([*coarse, labels[:, None], pixels], 1).tobytes()
        else:
            key = "fine_labels" if classes == 100 else "labels"
            batch = {
                "data": pixels,
                key: labels.tolist(),
                "coarse_labels": [19] * RECORDS,
                "batch_label": "b",
            }
            files[name] = pickler(batch)
        truth[name] = (pixels.reshape(-1, 3, 32, 32), labels)
    return files, truth


def unpack(root, version, files):
    for name, content in files.items():
        path = root / version.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def pack(root, version, files):
    with tarfile.open(root / version.archive, "w:gz") as archive:
        for name, content in {"readme.html": b"<html>", **files}.items():
            member = tarfile.TarInfo(f"{version.folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("place", [unpack, pack])
@pytest.mark.parametrize(
    ("version", "classes"), [(BINARY10, 10), (PYTHON10, 10), (BINARY100, 100), (PYTHON100, 100)]
)
def test_reads_what_was_written(tmp_path, version, classes, place):
    files, truth = contents(version, classes)
    place(tmp_path, version, files)
    train, test, _ = read(cifar.source("small", classes, [version], {}), tmp_path)
    names = [name for name, _ in version.train]
    assert train.inputs.numpy().tolist() == np.concatenate([truth[name][0] for name in names]).tolist()
    assert train.targets.tolist() == np.concatenate([truth[name][1] for name in names]).tolist()
    assert test.inputs.numpy().tolist() == truth[version.test[0]][0].tolist()
    assert test.targets.tolist() == truth[version.test[0]][1].tolist()
    assert train.classes == classes
    assert train.mean is not None
    np.testing.assert_allclose(train.mean, (train.inputs.double() / 255).mean((0, 2, 3)).numpy(), rtol=1e-12)
    np.testing.assert_allclose(
        train.std, (train.inputs.double() / 255).std((0, 2, 3), correction=0).numpy(), rtol=1e-12
    )
    assert (test.mean, test.std) == (train.mean, train.std)
    extracted = {path.name for path in tmp_path.iterdir()} - {
        version.folder,
        version.archive,
        "fedpara-cache",
    }
    assert not extracted


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_reads_newer_pickle_protocols(tmp_path, protocol):
    files, truth = contents(PYTHON10, 10, lambda batch: pickle.dumps(batch, protocol))
    unpack(tmp_path, PYTHON10, files)
    train, _, _ = read(cifar.source("small", 10, [PYTHON10], {}), tmp_path)
    assert train.targets[:RECORDS].tolist() == truth["data_batch_1"][1].tolist()


class Payload:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_malicious_pickle_is_rejected_and_never_runs(tmp_path, protocol):
    import os

    loot = tmp_path / "loot"
    files, _ = contents(PYTHON10, 10)
    files["data_batch_2"] = pickle.dumps({"data": Payload(os.mkdir, str(loot))}, protocol)
    unpack(tmp_path, PYTHON10, files)
    with pytest.raises(DataError, match=r"data_batch_2: it asks for posix\.mkdir: expected only"):
        read(cifar.source("small", 10, [PYTHON10], {}), tmp_path)
    assert not loot.exists()
    assert not (tmp_path / "fedpara-cache").exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Payload(eval, "1")),
        pickle.dumps(Payload(getattr, "", "join")),
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cnumpy\nload\n.",
        b"c__main__\nanything\n.",
        b"c_codecs\ndecode\n.",
    ],
)
def test_any_other_global_is_rejected(content):
    with pytest.raises(DataError, match=r"it asks for .*expected only"):
        pickles.loads(content, "batch")


def test_codecs_encode_is_accepted_for_latin1_only():
    with pytest.raises(DataError, match="text in the encoding 'rot13'"):
        pickles.loads(b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.", "batch")


def test_every_cut_of_a_pickle_is_a_data_error():
    whole = old_pickle({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2]})
    for length in range(len(whole)):
        with pytest.raises(DataError, match="batch is damaged"):
            pickles.loads(whole[:length], "batch")


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {"data": np.zeros((RECORDS, 3072), np.float32), "labels": [0] * RECORDS},
        {"data": np.zeros((RECORDS - 1, 3072), np.uint8), "labels": [0] * RECORDS},
        {"data": np.zeros((RECORDS, 3072), np.uint8)},
        {"data": np.zeros((RECORDS, 3072), np.uint8), "labels": ["0"] * RECORDS},
        {"data": np.zeros((RECORDS, 3072), np.uint8), "labels": [2**70] * RECORDS},
    ],
)
def test_a_batch_of_another_form_is_rejected(batch):
    with pytest.raises(DataError, match=r"data_batch_1: .*expected"):
        PYTHON10.decode(pickle.dumps(batch), RECORDS, "data_batch_1")


@pytest.mark.parametrize("length", [0, 3073 * RECORDS - 1, 3073 * RECORDS + 1, 3073 * (RECORDS + 1)])
def test_a_binary_file_of_another_size_is_named(tmp_path, length):
    files, _ = contents(BINARY10, 10)
    files["data_batch_3.bin"] = bytes(length)
    unpack(tmp_path, BINARY10, files)
    with pytest.raises(DataError, match=rf"data_batch_3\.bin could not be read .*size {length} into shape"):
        read(cifar.source("small", 10, [BINARY10], {}), tmp_path)
    assert not (tmp_path / "fedpara-cache").exists()


def test_the_published_sizes_are_expected(tmp_path):
    """Sparse files: the six of CIFAR-10's binary version are 30,730,000 bytes each."""
    unpack(tmp_path, BINARY10, dict.fromkeys(BINARY10.names, b""))
    for name in BINARY10.names:
        with open(tmp_path / BINARY10.folder / name, "r+b") as file:
            file.truncate(30_730_000 if name != "data_batch_2.bin" else 30_000_000)
    with pytest.raises(DataError, match=r"data_batch_2\.bin .*size 30000000 into shape \(10000,3073\)"):
        load("cifar10", tmp_path)


def test_a_label_out_of_range_is_rejected(tmp_path):
    files, _ = contents(BINARY10, 10)
    files["test_batch.bin"] = b"\x0a" + files["test_batch.bin"][1:]
    unpack(tmp_path, BINARY10, files)
    with pytest.raises(
        DataError, match=r"cifar-10-batches-bin is damaged: targets run from \d to 10: expected 0 to 9"
    ):
        read(cifar.source("small", 10, [BINARY10], {}), tmp_path)
    assert not (tmp_path / "fedpara-cache").exists()


def test_a_cut_archive_is_named(tmp_path):
    files, _ = contents(BINARY10, 10)
    pack(tmp_path, BINARY10, files)
    path = tmp_path / BINARY10.archive
    path.write_bytes(path.read_bytes()[:40_000])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz could not be read"):
        read(cifar.source("small", 10, [BINARY10], {}), tmp_path)


def test_an_archive_without_a_file_names_it(tmp_path):
    files, _ = contents(BINARY10, 10)
    del files["data_batch_4.bin"]
    pack(tmp_path, BINARY10, files)
    with pytest.raises(DataError, match=r"tar\.gz lacks cifar-10-batches-bin/data_batch_4\.bin"):
        read(cifar.source("small", 10, [BINARY10], {}), tmp_path)


def test_a_folder_with_a_missing_file_is_skipped_if_another_version_is_complete(tmp_path):
    files, _ = contents(BINARY10, 10)
    unpack(
        tmp_path, BINARY10, {name: content for name, content in files.items() if name != "data_batch_5.bin"}
    )
    source = cifar.source("small", 10, [BINARY10, PYTHON10], {})
    with pytest.raises(DataError, match=r"incomplete: .*cifar-10-batches-bin lacks data_batch_5\.bin"):
        read(source, tmp_path)
    python_files, truth = contents(PYTHON10, 10)
    unpack(tmp_path, PYTHON10, python_files)
    train, _, _ = read(source, tmp_path)
    assert train.targets[:RECORDS].tolist() == truth["data_batch_1"][1].tolist()
