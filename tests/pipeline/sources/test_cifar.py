"""CIFAR's four archives, written here byte for byte as the originals are."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import warnings

import numpy as np
import pytest

from thermopile.pipeline.errors import SourceError
from thermopile.pipeline.sources.cifar import CifarSource

TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
HUNDRED = tuple(f"class {number:02}" for number in range(100))
TWENTY = tuple(f"superclass {number:02}" for number in range(20))
ROWS = 6


def python2_pickle(value):
    """Protocol 2 as Python 2's cPickle and the numpy of its time wrote it: strings are bytes."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value):
    match value:
        case int():
            return b"K" + bytes([value])
        case str():
            return b"U" + bytes([len(value)]) + value.encode()
        case list():
            return b"](" + b"".join(map(_python2, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_python2(key) + _python2(item) for key, item in value.items()) + b"u"
    rows, columns = value.shape
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    data = b"T" + struct.pack("<i", value.nbytes) + value.tobytes()
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01" + struct.pack("<cicH", b"J", rows, b"M", columns) + b"\x86" + kind + b"\x89" + data + b"tb"
    )


def batch(number, classes):
    """pixels uint8 [ROWS, 3072] and labels, another for each number."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (ROWS, 3072), np.uint8), rng.integers(0, classes, ROWS).tolist()


def python_files(classes):
    tens, labels_key = classes == 10, "labels" if classes == 10 else "fine_labels"
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if tens else ["train", "test"]
    meta = {"label_names": list(TEN)}
    if not tens:
        meta = {"coarse_label_names": list(TWENTY), "fine_label_names": list(HUNDRED)}
    files = {"batches.meta" if tens else "meta": python2_pickle(meta)}
    for number, name in enumerate(names):
        pixels, labels = batch(number, classes)
        rest = {"batch_label": "a batch", "filenames": ["a_s_000001.png"] * ROWS}
        superclasses = [label % 20 for label in labels]
        files[name] = python2_pickle(rest | {labels_key: labels, "coarse_labels": superclasses, "data": pixels})
    return files


def binary_files(classes):
    tens = classes == 10
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"] if tens else ["train.bin", "test.bin"]
    files = {"batches.meta.txt" if tens else "fine_label_names.txt": "\n".join((*(TEN if tens else HUNDRED), "", ""))
             .encode()}  # fmt: skip
    if not tens:
        files["coarse_label_names.txt"] = "\n".join((*TWENTY, "")).encode()
    for number, name in enumerate(names):
        pixels, labels = batch(number, classes)
        records = [bytes([label] if tens else [label % 20, label]) + row.tobytes()
                   for row, label in zip(pixels, labels, strict=True)]  # fmt: skip
        files[name] = b"".join(records)
    return files


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def pack(archive, files, folder="cifar-10-batches-py"):
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


def read_back(source):
    samples = [source[i] for i in range(len(source))]
    pixels = np.stack([np.asarray(sample.picture).transpose(2, 0, 1).reshape(3072) for sample in samples])
    return pixels, [sample.group for sample in samples]


def test_the_pickles_written_here_are_what_python_reads_from_the_originals():
    pixels, labels = batch(0, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.core has moved since
        value = pickle.loads(python2_pickle({"labels": labels, "data": pixels}), encoding="latin1")
    assert value["labels"] == labels
    assert np.array_equal(value["data"], pixels)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("files_of", [python_files, binary_files])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar.gz"])
def test_pixels_and_fine_classes_are_those_of_the_archive_however_it_comes(tmp_path, classes, files_of, packed):
    files = files_of(classes)
    root = pack(tmp_path / "cifar.tar.gz", files) if packed else write(tmp_path / "cifar", files)
    train, test = CifarSource(root, test=False), CifarSource(root, test=True)
    batches = 5 if classes == 10 else 1
    names = TEN if classes == 10 else HUNDRED
    for source, numbers in ((train, range(batches)), (test, [batches])):
        expected = [batch(number, classes) for number in numbers]
        pixels, groups = read_back(source)
        assert np.array_equal(pixels, np.concatenate([part[0] for part in expected]))
        assert groups == [names[label] for part in expected for label in part[1]]
        assert source.groups().names == names
    assert train[0].picture.size == (32, 32)
    assert f"cifar-{classes}" in train.describe()["kind"]


@pytest.mark.parametrize("files_of", [python_files, binary_files])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar.gz"])
def test_the_superclasses_of_cifar_100_can_be_the_classes(tmp_path, files_of, packed):
    files = files_of(100)
    root = pack(tmp_path / "cifar.tar.gz", files) if packed else write(tmp_path / "cifar", files)
    for number, test in enumerate((False, True)):
        source = CifarSource(root, test=test, superclasses=True)
        pixels, groups = read_back(source)
        assert np.array_equal(pixels, batch(number, 100)[0])
        assert groups == [TWENTY[label % 20] for label in batch(number, 100)[1]]
        assert source.groups().names == TWENTY
        assert source.describe()["listing"] != CifarSource(root, test=test).describe()["listing"]


@pytest.mark.parametrize("files_of", [python_files, binary_files])
def test_cifar_10_has_no_superclasses_and_says_so(tmp_path, files_of):
    root = write(tmp_path / "cifar", files_of(10))
    with pytest.raises(SourceError, match=r"is not a CIFAR-100 archive.* none of meta, coarse_label_names\.txt"):
        CifarSource(root, test=False, superclasses=True)


def test_a_key_is_the_batch_and_the_place_in_it(tmp_path):
    root = write(tmp_path / "cifar", binary_files(10))
    source = CifarSource(root, test=False)
    assert [source.key(i) for i in (0, ROWS - 1, ROWS, 5 * ROWS - 1)] == [
        "data_batch_1/0", "data_batch_1/5", "data_batch_2/0", "data_batch_5/5",
    ]  # fmt: skip
    assert CifarSource(root, test=True).uri(2) == "cifar/test_batch/2"


def test_the_folder_may_lie_in_the_one_that_is_given(tmp_path):
    write(tmp_path / "cifar-100-python", python_files(100))
    assert len(CifarSource(tmp_path, test=False)) == ROWS


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_pickles_rewritten_by_python_3_are_read(tmp_path, protocol):
    pixels, labels = batch(0, 10)
    data = pickle.dumps({"labels": labels, "data": pixels}, protocol)
    source = CifarSource(write(tmp_path / "cifar", python_files(10) | {"test_batch": data}), test=True)
    assert np.array_equal(read_back(source)[0], pixels)


class Hostile:
    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize("name", ["test_batch", "batches.meta"])
def test_a_pickle_that_would_run_a_command_is_refused_and_the_command_not_run(tmp_path, name):
    trace = tmp_path / "trace"
    data = pickle.dumps(Hostile(os.system, f"touch {trace}"), 2)
    root = write(tmp_path / "cifar", python_files(10) | {name: data})
    with pytest.raises(SourceError, match=rf"{name} is not a CIFAR pickle: it asks for posix.system"):
        CifarSource(root, test=True)
    assert not trace.exists()


def without(files, name):
    return {other: data for other, data in files.items() if other != name}


def with_labels(labels, pixels=None):
    pixels = batch(0, 10)[0] if pixels is None else pixels
    return python_files(10) | {"test_batch": pickle.dumps({"labels": labels, "data": pixels}, 2)}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "is not a CIFAR archive"),
        (without(python_files(10), "test_batch"), "cifar-10 python but lacks test_batch"),
        (with_labels([0, 1, 2, 3, 4, 10]), "labels 0 to 10 for 10 classes"),
        (with_labels([0, 1, 2, 3, 4, -1]), "labels -1 to 4 for 10 classes"),
        (with_labels([0, 1, 2, 3, 4, 10**30]), "test_batch: Python int"),
        (with_labels([0, 1, 2, 3, 4, "x"]), "has no 'data' with integers in 'labels'"),
        (with_labels([[0], [1], [2], [3], [4], [5]]), "has no 'data' with integers in 'labels'"),
        (with_labels([0, 1, 2]), r"shape \(6, 3072\) for 3 labels"),
        (with_labels([]), "for 0 labels"),
        (with_labels([0] * 6, batch(0, 10)[0][:, :3000]), r"shape \(6, 3000\)"),
        (with_labels([0] * 6, batch(0, 10)[0].astype(np.int32)), "not an array of uint8"),
        (with_labels([0] * 6, np.asfortranarray(batch(0, 10)[0])), "not an array of uint8 in C order"),
        (python_files(10) | {"test_batch": pickle.dumps([1, 2])}, "has no 'data'"),
        (python_files(10) | {"test_batch": python_files(10)["test_batch"][:-100]}, "is not a CIFAR pickle"),
        (python_files(10) | {"batches.meta": pickle.dumps({"label_names": [b"x"]})}, "has no list 'label_names'"),
        (binary_files(100) | {"test.bin": b"x" * 3075}, "not a multiple of 3,074"),
        (binary_files(100) | {"test.bin": b""}, "for 0 labels"),
        (binary_files(10) | {"test_batch.bin": bytes([10]) + bytes(3072)}, "labels 10 to 10 for 10 classes"),
    ],
)
def test_a_damaged_archive_is_refused_with_what_is_wrong(tmp_path, files, reason):
    with pytest.raises(SourceError, match=reason):
        CifarSource(write(tmp_path / "cifar", files), test=True)


def test_a_truncated_archive_and_a_file_that_is_not_one_are_refused(tmp_path):
    whole = pack(tmp_path / "whole.tar.gz", python_files(10)).read_bytes()
    for name, data in (("cut", whole[:-2000]), ("text", b"hello"), ("plain", gzip.compress(b"hello"))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SourceError, match=r"is not a complete .tar.gz"):
            CifarSource(tmp_path / name, test=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="neither a folder nor a file"):
        CifarSource(tmp_path / "pipe", test=True)


def test_nothing_of_an_archive_is_written_to_disk(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    archive = pack(tmp_path / "cifar.tar.gz", python_files(10), folder="../..")
    assert len(CifarSource(archive, test=True)) == ROWS
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cifar.tar.gz", "here"]
