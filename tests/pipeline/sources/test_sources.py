"""What every source promises that reads any sample on request, whatever it reads; tars are in test_webdataset.py.

Classes are compared between all sources, tars included.
"""

import hashlib
import io
import json
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from thermopile.pipeline.errors import BadSampleError
from thermopile.pipeline.sources import NEVER, Asked, BadSample
from thermopile.pipeline.sources.arrays import ArraysSource
from thermopile.pipeline.sources.cifar import CifarSource
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.dataset_source import DatasetSource
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.sources.karpathy import KarpathySource
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.pipeline.sources.webdataset import WebDatasetSource

from support.conversions import dataset_of
from support.tars import samples_of, write_members

CLASSES = ("cat", "dog", "", "cat", "10", "dog", "9")
"""Classes of the samples; the empty name means none."""


def picture(number):
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 24, 3), np.uint8)).save(data, "PNG")
    return data.getvalue()


def folder(root):
    for number, name in enumerate(CLASSES):
        path = root / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return FolderSource(root)


def glyphs(root):
    return GlyphSource(0, test=True)


def cifar(root):
    root.mkdir()
    (root / "batches.meta.txt").write_text("cat\ndog\n\n")
    pixels = np.random.default_rng(0).integers(0, 256, (7, 3072), np.uint8)
    labels = np.array([0, 1, 1, 0, 1, 0, 0], np.uint8)[:, None]
    np.hstack([labels, pixels]).tofile(root / "test_batch.bin")
    return CifarSource(root, test=True)


def csv(root):
    root.mkdir()
    lines = ["filepath,title,class"]
    for number, name in enumerate(CLASSES):
        (root / f"{number}.png").write_bytes(picture(number))
        lines.append(f'{number}.png,"sample ""{number}"", drawn",{name}')
    (root / "list.csv").write_text("\n".join([*lines, "gone.png,no picture,cat", "one column", "1.png,,dog"]))
    return CsvSource(root / "list.csv", group="class")


def karpathy(root):
    root.mkdir()
    images = [
        {"filename": f"{number}.png", "split": "test", "sentences": [{"raw": "drawn"}, {"raw": f"sample {number}"}]}
        for number in range(7)
    ]
    for number in range(7):
        (root / f"{number}.png").write_bytes(picture(number))
    images += [images[0] | {"filename": "gone.png"}, images[0] | {"filename": "0.png", "sentences": []}]
    (root / "list.json").write_text(json.dumps({"images": images}))
    return KarpathySource(root / "list.json", test=True)


def arrays(root):
    root.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (7, 16, 24, 3), np.uint8)
    np.savez(root / "pictures.npz", images=pixels, labels=[0, 1, 10, 0, 9, 1, 0])
    return ArraysSource([root / "pictures.npz"])


def parquet(root):
    root.mkdir()
    for part in range(2):
        numbers = range(part * 4, min(7, part * 4 + 4))
        table = pa.table({
            "image": [{"bytes": picture(number), "path": None} for number in numbers],
            "caption": [f"sample {number}" if number != 5 else None for number in numbers],
            "label": [CLASSES[number] or None for number in numbers],
        })  # fmt: skip
        # The statistics of a row group of three would hold its first and last picture as well.
        pq.write_table(table, root / f"{part}.parquet", row_group_size=3, write_statistics=False)
    return ParquetSource([root / "0.parquet", root / "1.parquet"])


def dataset(root):
    root.mkdir()
    dataset_of(parquet(root / "parquet"), root / "dataset", max_error_rate=0.2)
    return DatasetSource(root / "dataset")


KINDS = [folder, glyphs, cifar, csv, karpathy, arrays, parquet, dataset]


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def source(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("source") / "data")


@pytest.fixture(scope="module")
def samples(source):
    """Those that can be read, by index; of many, fifty."""
    samples = {}
    for index in range(0, len(source), max(1, len(source) // 50)):
        try:
            samples[index] = source[index]
        except BadSampleError:
            continue
    assert len(samples) >= 6
    return samples


def test_every_sample_has_the_uri_and_the_key_that_it_is_announced_under(source, samples):
    for index, sample in samples.items():
        assert (sample.uri, sample.key) == (source.uri(index), source.key(index))
    assert all(source.uri(index).isprintable() for index in range(len(source)))
    assert len({(source.uri(index), source.key(index)) for index in range(len(source))}) == len(source)


def test_the_classes_known_beforehand_are_those_of_the_samples(source, samples):
    if (groups := source.groups()) is None:
        assert {sample.group for sample in samples.values()} == {None}
        return
    assert groups.of_sample.dtype == np.int32
    assert len(groups.of_sample) == len(source)
    assert len(set(groups.names)) == len(groups.names)
    for index, sample in samples.items():
        assert (groups.names[groups.of_sample[index]] or None) == sample.group


def test_the_captions_of_some_samples_are_those_that_the_samples_have(source, samples):
    some = np.array(sorted(samples)[::-2], np.int64)
    captions = sorted(source.captions(some))
    assert captions == sorted(caption for index in some.tolist() for caption in samples[index].captions)
    assert all((sample.caption is not None) == (source.mode == "pairs") for sample in samples.values())


def test_captions_of_samples_that_have_none_are_passed_over(source):
    usable = list(source.captions(np.arange(len(source))))
    assert all(isinstance(caption, str) and caption for caption in usable)


def test_a_worker_that_gets_the_source_reads_the_same_samples(source, samples):
    list(source.captions(np.arange(len(source))))
    asked, copy = Asked(selection=np.array([*samples])), pickle.loads(pickle.dumps(source))
    assert (copy.mode, copy.describe()) == (source.mode, source.describe())
    (work,) = source.works(source.facts(asked, print), asked, 1, NEVER)
    read = {found.source_index: found.sample for found in copy.read(pickle.loads(pickle.dumps(work)))}
    for index, sample in samples.items():
        assert read[index]._replace(picture=None) == sample._replace(picture=None)
        assert as_bytes(read[index].picture) == as_bytes(sample.picture)


def test_a_sent_source_is_small(source):
    held_pictures = source.stored_bytes() if isinstance(source, CifarSource) else 0
    assert len(pickle.dumps(source)) - held_pictures < 200 * len(source) + 4000


def test_chunks_cover_the_source_from_its_start_to_its_end(source):
    if (chunks := source.chunks()) is not None:
        assert (chunks[0], chunks[-1], chunks.dtype) == (0, len(source), np.int64)
        assert (np.diff(chunks) > 0).all()


def test_the_description_is_json_and_says_what_kind_the_source_is(source):
    description = json.loads(json.dumps(source.describe()))
    assert description == source.describe()
    assert description["kind"]
    if not isinstance(source, GlyphSource):
        assert len(description["listing"]) == hashlib.sha256().digest_size * 2


def test_the_estimate_is_about_the_size_of_the_pictures(source, samples):
    pictures = [sample.picture for sample in samples.values()]
    assert source.stored_bytes() / len(source) == pytest.approx(np.mean([len(as_bytes(p)) for p in pictures]), rel=0.5)


def as_bytes(image):
    return image if isinstance(image, bytes) else image.tobytes()


def test_the_sources_load_nothing_that_each_worker_process_would_pay_for_in_vain():
    names = ("csv_source", "parquet", "webdataset", "folder", "arrays", "dataset_source", "caption_lengths")
    imports = "; ".join(f"import thermopile.pipeline.sources.{name}" for name in names)
    program = f"import sys; {imports}; sys.exit(str({{'torch', 'pandas', 'matplotlib', 'scipy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


def classes_in_tars(path, classes, suffix, option):
    members = [member for n, each in enumerate(classes) for member in ((f"{n}.png", b"x"), (f"{n}.{suffix}", each))]
    samples = samples_of(WebDatasetSource([write_members(path, *members)], group=option))
    return [sample if isinstance(sample, BadSample) else sample.group for sample in samples]


def classes_in_parquet(path, classes):
    pq.write_table(pa.table({"image": [b"x"] * len(classes), "label": classes}), path)
    return ParquetSource([path])


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([1.0, 0.0, -2.0, 1e15, 10.0], ["1", "0", "-2", "1000000000000000", "10"]),
        (["1.0", "1", "1.5", "v1.0", " a "], ["1", "1", "1.5", "v1.0", "a"]),
        ([3, -1], ["3", "-1"]),
        ([0.5, 4.0, -1.25, 0.1], ["0.5", "4", "-1.25", "0.1"]),
    ],
)
def test_a_class_has_one_name_in_every_source(tmp_path, values, names):
    for number in range(len(values)):
        (tmp_path / f"{number}.png").write_bytes(b"x")
    rows = "".join(f"{number}.png,{value}\n" for number, value in enumerate(values))
    for number, more in enumerate((b"", b"0.png,\xff\n")):  # which is not UTF-8
        (tmp_path / f"{number}.csv").write_bytes(b"filepath,class\n" + rows.encode() + more)
        listed = CsvSource(tmp_path / f"{number}.csv", caption=None, group="class")
        assert [listed[place].group for place in range(len(values))] == names
    table = classes_in_parquet(tmp_path / "a.parquet", values)
    assert [table[number].group for number in range(len(values))] == names
    assert {*table.groups().names} == {*names}
    assert classes_in_tars(tmp_path / "0.tar", [str(each).encode() for each in values], "cls", "cls") == names
    fields = [json.dumps({"class": value}).encode() for value in values]
    assert classes_in_tars(tmp_path / "1.tar", fields, "json", "json:class") == names


def test_a_list_of_one_class_is_a_class_and_a_list_of_several_is_none(tmp_path):
    values = [["a"], ["a", "b"], []]
    table = classes_in_parquet(tmp_path / "a.parquet", values)
    assert [table[number].group for number in range(3)] == ["a", None, None]
    assert table.groups().of_sample.tolist() == [1, 0, 0]
    fields = [json.dumps({"class": value}).encode() for value in [*values, {"a": 1}, "\ud800"]]
    *classes, of_names, half_of_a_pair = classes_in_tars(tmp_path / "0.tar", fields, "json", "json:class")
    assert classes == ["a", None, None]
    assert "its class is a dict, not one text or number" in of_names.reason
    assert "the caption or class is not UTF-8" in half_of_a_pair.reason
