"""A dataset made of another one's samples."""

import pickle

import numpy as np
import pytest

from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.errors import BadSampleError, SourceError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.dataset_source import DatasetSource
from thermopile.pipeline.sources.glyphs import GlyphSource

from support.conversions import dataset_of

COLUMNS = ["uri", "key", "group", "captions", "width", "height"]


@pytest.mark.parametrize("of", ["captions_dataset", "images_dataset"])
def test_pictures_captions_and_tables_are_copied_byte_for_byte(of, request, tmp_path):
    whole = request.getfixturevalue(of)
    kept, source = np.arange(3, whole.n, 5), DatasetSource(whole.path)
    settings = ConvertSettings(image=whole.index.image, **(
        {"tokenizer": whole.tokenizer_path, "context_length": whole.index.tokenizer.context_length}
        if whole.index.tokenizer else {}
    ))  # fmt: skip
    convert(source, tmp_path / "out", settings, selection=kept, workers=2)
    out = Dataset(tmp_path / "out")
    assert list(check_dataset(out.path)) == []
    assert out.n == len(kept)
    place = {key: id for id, key in zip(kept.tolist(), whole.take(kept, ["key"])["key"].to_pylist(), strict=True)}
    ids = np.array([place[key] for key in out.column("key").to_pylist()])
    assert sorted(ids) == kept.tolist()
    assert ids.tolist() != kept.tolist(), "the samples are not mixed"
    assert out.take(np.arange(out.n), COLUMNS).to_pylist() == whole.take(ids, COLUMNS).to_pylist()
    for new, old in enumerate(ids.tolist()):
        assert out.jpeg(new) == whole.jpeg(old)
    if whole.index.tokenizer:
        assert out.tokenizer_path.read_bytes() == whole.tokenizer_path.read_bytes()
        assert (out.index.tokenizer.end_id, out.index.mode) == (whole.index.tokenizer.end_id, "pairs")


def test_the_classes_are_those_of_the_dataset(pairs_dataset, images_dataset):
    for dataset in (pairs_dataset, images_dataset):
        groups = DatasetSource(dataset.path).groups()
        assert [groups.names[code] for code in groups.of_sample] == dataset.column("group").to_pylist()


def test_a_worker_gets_the_path_and_opens_the_dataset_itself(pairs_dataset):
    source = DatasetSource(pairs_dataset.path)
    source[5]
    sent = pickle.dumps(source)
    assert len(sent) < 1_000
    assert pickle.loads(sent)[5] == source[5]


def test_a_sample_that_cannot_be_read_is_a_bad_one(tmp_path):
    dataset_of(GlyphSource(0, test=True), tmp_path / "whole", selection=np.arange(50))
    source = DatasetSource(tmp_path / "whole")
    beton = next((tmp_path / "whole" / "shards").glob("*.beton"))
    beton.write_bytes(bytes(beton.stat().st_size))
    with pytest.raises(BadSampleError):
        source[5]


def test_what_is_no_dataset_is_no_source(tmp_path):
    with pytest.raises(SourceError, match="is not a dataset"):
        DatasetSource(tmp_path)
