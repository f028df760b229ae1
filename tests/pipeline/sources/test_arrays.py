"""Pictures and classes as arrays, whole and damaged."""

import gzip
import io
import os
import pickle
import struct

import numpy as np
import pytest
from obstore.store import MemoryStore

from thermopile.pipeline.errors import SourceError
from thermopile.pipeline.sources import arrays
from thermopile.pipeline.sources.arrays import ArraysSource
from thermopile.storage import bucket
from thermopile.storage.bucket import Address

COLOURED = np.random.default_rng(0).integers(0, 256, (7, 5, 6, 3), np.uint8)
GREY = COLOURED[..., 0]
LABELS = np.array([0, 1, 1, 0, 5, 10, 2])
NAMES = ["0", "1", "1", "0", "5", "10", "2"]
HEAD = b"\0\0\x08\x03"


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(save=np.savez, **named):
    file = io.BytesIO()
    save(file, **named)
    return file.getvalue()


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def header(*shape):
    """A .npy that has nothing else."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.fixture
def opened(tmp_path):
    """Writes files, named by the letters from a on, and opens them."""

    def write(*contents, **options):
        files = [tmp_path / "abc"[place] for place in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        return ArraysSource(files, **options)

    return write


PAIRS = {
    "npy": (npy(COLOURED), npy(LABELS)),
    "npz": (npz(images=COLOURED, labels=LABELS),),
    "npz of keras": (npz(np.savez_compressed, x_train=COLOURED, y_train=LABELS[:, None], x_test=GREY),),
    "npz without names": (npz(arr_0=COLOURED, arr_1=LABELS),),
    "columns first": (npy(np.asfortranarray(COLOURED)), npy(LABELS.astype(">i2"))),
    "idx": (idx(GREY), idx(LABELS.astype(np.uint8))),
    "idx, packed": (gzip.compress(idx(GREY)), gzip.compress(idx(LABELS.astype(np.uint8)))),
    "one channel": (npy(GREY[..., None]), npy(LABELS)),
}


@pytest.mark.parametrize("files", PAIRS.values(), ids=PAIRS)
def test_pictures_and_classes_are_those_of_the_arrays_in_any_of_their_forms(opened, files):
    source = opened(*files)
    pictures = np.stack([np.asarray(source[place].picture) for place in range(len(source))])
    assert any(np.array_equal(pictures, expected) for expected in (COLOURED, GREY))
    assert [source[place].group for place in range(7)] == NAMES
    assert source.groups().names == ("0", "1", "2", "5", "10")
    assert (source[3].uri, source[3].key, source.mode) == ("a/3", "3", "images")


def test_without_an_array_of_classes_there_are_none(opened):
    for source in (opened(npy(GREY)), opened(npz(x=GREY)), opened(*PAIRS["npz"], group=None)):
        assert (source.groups(), source[0].group) == (None, None)


def test_arrays_of_an_npz_can_be_named_and_the_others_are_counted(opened):
    source = opened(npz(x_train=COLOURED, y_train=LABELS, x_test=GREY[:2], y_test=LABELS[4:6]))
    assert (len(source), str(source.unused)) == (7, "; 2 × arrays, such as x_test: --image NAME --group NAME")
    test = opened((source.files[0]).read_bytes(1 << 20), image="x_test", group="y_test")
    assert [test[place].group for place in range(2)] == ["5", "10"]


@pytest.mark.parametrize("files", [PAIRS["npy"], PAIRS["idx"][:1]])
@pytest.mark.parametrize("options", [{"image": "photos"}, {"group": "kind"}, {"group": None}])
def test_names_of_arrays_are_refused_where_no_file_has_any(opened, files, options):
    with pytest.raises(SourceError, match=r"--image and --group name arrays of an \.npz, which .*a is not"):
        opened(*files, **options)
    assert opened(npz(photos=COLOURED), npy(LABELS), image="photos").groups().names == ("0", "1", "2", "5", "10")


def test_a_worker_holds_the_pictures_of_its_shard_alone(opened):
    pixels = np.random.default_rng(1).integers(0, 256, (200, 32, 32, 3), np.uint8)
    source = opened(npy(pixels), npy(np.arange(200)))
    sent = pickle.dumps(source), pickle.dumps(source.work(np.array([150, 2])))
    assert sum(map(len, sent)) < pixels.nbytes / 20
    found = list(pickle.loads(sent[0]).read(pickle.loads(sent[1])))
    assert [(each.source_index, each.sample.group) for each in found] == [(150, "150"), (2, "2")]
    assert np.array_equal(np.asarray(found[0].sample.picture), pixels[150])


def test_the_digest_that_tells_of_changed_files_is_of_pixels_classes_and_their_names(opened):
    others = COLOURED.copy()
    others[6, 4, 5, 2] ^= 1
    made = [(COLOURED, LABELS), (others, LABELS), (COLOURED, LABELS[::-1]), (COLOURED, LABELS + 1)]
    sources = [opened(npy(pixels), npy(labels)) for pixels, labels in made]
    assert len({source.describe()["listing"] for source in sources}) == 4
    assert len({tuple(source.marks().items()) for source in sources}) == 4
    assert [*sources[0].marks()] == ["a", "b"]


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_objects_are_refused_and_no_pickle_is_read(opened, tmp_path):
    trap = np.array([Trap(str(tmp_path / "sprung"))] * 7, object)
    whole = npz(np.savez, images=COLOURED, labels=trap)
    for files in ([npy(trap)], [npy(COLOURED), npy(trap)], [whole]):
        with pytest.raises(SourceError, match="Object arrays cannot be loaded"):
            opened(*files)
    with pytest.raises(SourceError, match=r"neither \.npy nor \.npz nor idx"):
        opened(pickle.dumps(trap))
    assert not (tmp_path / "sprung").exists()


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


PACKED = gzip.compress(idx(GREY))
REFUSED = {
    "empty": ([b""], "neither"),
    "text": ([b"hello"], "neither"),
    "cut npy": ([npy(COLOURED)[:-20]], "expected 630 bytes got 610"),
    "cut npy header": ([npy(COLOURED)[:30]], "cannot be read"),
    "cut npz": ([PAIRS["npz"][0][:-20]], "not a zip file"),
    "changed npz": ([flipped(npz(np.savez_compressed, images=COLOURED), 200)], "cannot be read"),
    "cut idx": ([idx(GREY)[:-20]], "says 210 values, but it has 190"),
    "longer idx": ([idx(GREY) + b"x"], "says 210 values, but it has more"),
    "cut idx header": ([HEAD + b"\0\0\0\1"], "but it has"),
    "cut gzip": ([PACKED[:-20]], "ended before"),
    "changed gzip": ([flipped(PACKED, len(PACKED) - 8)], "CRC"),
    "gzip of text": ([gzip.compress(b"hello")], "an idx file begins with"),
    "idx of floats": ([b"\0\0\x0d\1" + struct.pack(">If", 1, 1.0)], "for unsigned bytes"),
    "npy of 10¹⁴ bytes": ([header(10**6, 10**4, 10**4)], "cannot be read"),
    "idx of 10²⁷ bytes": ([HEAD + struct.pack(">3I", *[1 << 31] * 3)], "above 4,294,967,296"),
    "no dimension": ([b"\0\0\x08\0\1"], r"uint8 \(\); pictures are uint8, n × H × W or"),
    "255 dimensions": ([b"\0\0\x08\xff" + b"\0\0\0\1" * 255 + b"\1"], "dimension"),
    "floats": ([npy(COLOURED / 255)], r"a is float64 \(7, 5, 6, 3\); pictures are uint8"),
    "one picture": ([npy(COLOURED[0])], r"uint8 \(5, 6, 3\); pictures are uint8, n × H × W or"),
    "channels first": ([npy(COLOURED.transpose(0, 3, 1, 2))], "n × H × W × 3"),
    "no pictures": ([npy(COLOURED[:0])], r"\(0, 5, 6, 3\)"),
    "labels first": ([npy(LABELS), npy(COLOURED)], "pictures are uint8"),
    "too few labels": ([npy(GREY), npy(LABELS[:6])], r"b is int64 \(6,\); classes are integers, one for each of 7"),
    "too many labels": ([npy(GREY), npy(np.append(LABELS, 1))], r"int64 \(8,\)"),
    "labels of halves": ([npy(GREY), npy(LABELS / 2)], "b is float64"),
    "one-hot labels": ([npy(GREY), npy(np.eye(7, dtype=int))], r"int64 \(7, 7\)"),
    "three files": ([npy(GREY), npy(LABELS), npy(LABELS)], r"pass an \.npz, or the file of the pictures and"),
    "no name known": ([npz(pixels=GREY)], "name one of pixels with --image"),
}


@pytest.mark.parametrize(("files", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_damaged_or_holds_something_else_is_refused_with_the_reason(opened, files, reason):
    with pytest.raises(SourceError, match=reason):
        opened(*files)


def test_a_name_given_for_the_classes_must_exist(opened):
    with pytest.raises(SourceError, match="has no array kind; name one of labels with --group"):
        opened(*PAIRS["npz"], group="kind")


def test_what_unpacks_to_more_than_the_limit_is_refused_before_it_is_unpacked(opened, monkeypatch):
    monkeypatch.setattr(arrays, "MAX_BYTES", 2_000)
    zeros = np.zeros((7, 30, 30), np.uint8)
    for bomb in (gzip.compress(idx(zeros)), npz(np.savez_compressed, images=zeros), npy(zeros)):
        with pytest.raises(SourceError, match="above 2,000; divide it, and add the other parts with --append"):
            opened(bomb)


def test_only_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path / "pipe", "named pipe"), (tmp_path, "directory"), (tmp_path / "none", "No such")):
        with pytest.raises(SourceError, match=reason):
            ArraysSource([path])


def test_arrays_may_lie_in_a_bucket(monkeypatch):
    store = MemoryStore()
    monkeypatch.setattr(bucket, "_store", lambda bucket, repeats=0: store)
    for number, files in enumerate((PAIRS["npz"], PAIRS["npy"], PAIRS["idx, packed"])):
        addresses = [Address("bucket", f"in/{number}/{place}") for place in range(len(files))]
        for address, content in zip(addresses, files, strict=True):
            address.write(content)
        source = ArraysSource(addresses)
        assert [source[place].group for place in range(7)] == NAMES
        assert source.describe()["root"] == f"s3://bucket/in/{number}"
