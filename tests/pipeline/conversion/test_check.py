"""Checking a dataset: what was damaged since, or was never right, is found and named."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.conversion.beton import BetonRow, write_beton
from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.dataset.index import seal_index, shard_name
from thermopile.pipeline.dataset.row_records import write_row_records
from thermopile.pipeline.dataset.tokenizer import train_tokenizer
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.files import sha256_of


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """60 pairs in two shards."""
    out = tmp_path_factory.mktemp("sound") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_ROWS", 30)
        patch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_BYTES", 1)
        convert(GlyphSource(0), out, ConvertSettings(), workers=1, selection=np.arange(0, 600, 10))
    return out


@pytest.fixture
def copy(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "copy")


def seal(path):
    """Make dataset.json fit the shards, as if they had been converted like this."""
    index = json.loads((path / "dataset.json").read_text())
    for shard, digests in enumerate(index["shard_digests"]):
        for suffix in digests:
            digests[suffix] = sha256_of(path / "shards" / shard_name(shard, suffix))
    for name in ("format", "fingerprint", "sha256"):
        del index[name]
    (path / "dataset.json").write_bytes(seal_index(index))


def rewrite(path, shard, change):
    """Write a shard again with its rows changed, their checksums too, and seal the dataset."""
    beton, records_file = (path / "shards" / shard_name(shard, suffix) for suffix in ("beton", "rows"))
    opened = Dataset(path).shard(shard)
    records = opened.records()
    rows = [BetonRow(opened.jpeg(row), int(record["height"]), int(record["width"]), opened.tokens_of(row),
                     int(record["source_index"])) for row, record in enumerate(records)]  # fmt: skip
    change(rows)
    records_file.unlink()
    records = write_beton(beton, rows, max_rows=len(rows), context_length=rows[0].tokens.shape[1])
    write_row_records(records_file, records, beton.stat().st_size)
    seal(path)


def replace(row, **values):
    def change(rows):
        rows[row] = rows[row]._replace(**{name: value(rows[row]) for name, value in values.items()})

    return change


def with_token(place, token, caption=0):
    def tokens(row):
        changed = row.tokens.copy()
        changed[caption, place] = token
        return changed

    return tokens


def found(path):
    return [(finding.kind, finding.where) for finding in check_dataset(path, workers=2)]


def test_nothing_is_found_in_a_sound_dataset_and_all_its_rows_are_read(sound):
    told = []
    assert list(check_dataset(sound, on_progress=told.append)) == []
    assert told == [30, 60]


def test_nothing_is_found_in_a_sound_dataset_without_captions(images_dataset):
    assert list(check_dataset(images_dataset.path)) == []


def test_one_changed_byte_is_found(copy):
    file = copy / "shards" / "shard-00001.beton"
    data = bytearray(file.read_bytes())
    data[-3000] ^= 1
    file.write_bytes(data)
    assert ("digest", "shard-00001.beton") in found(copy)


def test_files_cut_short_or_with_more_at_the_end_are_found(copy):
    first, second = (copy / "shards" / f"shard-0000{shard}.beton" for shard in (0, 1))
    first.write_bytes(first.read_bytes()[:3000])
    second.write_bytes(second.read_bytes() + b"more")
    assert found(copy) == [
        ("digest", "shard-00000.beton"), ("file", "shard-00000.beton"),
        ("digest", "shard-00001.beton"), ("file", "shard-00001.beton"),
    ]  # fmt: skip


ROW = "shard-00001.beton, row 7"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (replace(7, jpeg=lambda row: row.jpeg[:-200]), ("picture", ROW)),
        (replace(7, jpeg=lambda row: b"\xff\xd8 no more"), ("picture", ROW)),
        (replace(7, height=lambda row: 31), ("picture", ROW)),
        (replace(7, height=lambda row: 31), ("table", "shard-00001.parquet")),
        (replace(7, tokens=with_token(1, 60_000)), ("tokens", ROW)),
        (replace(7, tokens=lambda row: np.where(row.tokens == 2, np.int32(5), row.tokens)), ("tokens", ROW)),
        (replace(7, tokens=with_token(1, 300)), ("tokens", ROW)),
        (replace(7, source_index=lambda row: 4), ("source index", "shard-00001.beton")),
    ],
)
def test_a_row_that_was_never_right_is_found_though_all_digests_fit(copy, change, expected):
    if expected[0] == "source index":
        rewrite(copy, 1, replace(8, source_index=lambda row: 4))
    rewrite(copy, 1, change)
    assert expected in found(copy)
    assert "digest" not in dict(found(copy))


def test_every_caption_of_a_sample_is_checked_against_its_tokens_and_their_number(captions_dataset, tmp_path):
    row = int(np.flatnonzero(captions_dataset.shard(0).records()["captions"] == 4)[0])
    where = f"shard-00000.beton, row {row:,}"
    for number, (tokens, expected) in enumerate([
        (lambda row: row.tokens, []),
        (with_token(1, 300, caption=2), [("tokens", where, "the tokens do not match the caption (caption 3)")]),
        (with_token(1, 60_000, caption=3), [("tokens", where, "it has a token beyond the vocabulary")]),
        (lambda row: row.tokens[:3], [("table", "shard-00000.parquet", "its column 'captions' does not match")]),
    ]):  # fmt: skip
        copy = shutil.copytree(captions_dataset.path, tmp_path / str(number))
        rewrite(copy, 0, replace(row, tokens=tokens))
        for finding, (kind, place, what) in zip(check_dataset(copy), expected, strict=True):
            assert (finding.kind, finding.where) == (kind, place)
            assert what in finding.what


def test_a_sample_that_is_in_two_shards_is_found(copy):
    twice = int(Dataset(copy).shard(0).records()["source_index"][3])
    rewrite(copy, 1, replace(7, source_index=lambda row: twice))
    assert found(copy) == [("source index", ROW)]


def test_a_table_that_does_not_fit_its_rows_is_found(copy):
    file = copy / "shards" / "shard-00000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(0, "row", table["row"].take(list(range(29, -1, -1)))), file)
    seal(copy)
    assert found(copy) == [("table", "shard-00000.parquet")]


def test_a_damaged_table_of_rows_and_a_samples_table_of_other_rows_are_found(copy):
    file = copy / "shards" / "shard-00000.rows"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    pq.write_table(pq.read_table(file.with_name("shard-00001.parquet")).slice(1), file.with_name("shard-00001.parquet"))
    assert found(copy) == [
        ("digest", "shard-00000.rows"), ("file", "shard-00000.beton"),
        ("digest", "shard-00001.parquet"), ("table", "shard-00001.parquet"),
    ]  # fmt: skip


def test_another_tokenizer_is_found(copy):
    train_tokenizer(["quite other words"] * 9, vocab_size=300).save(str(copy / "tokenizer.json"))
    assert ("tokenizer", "tokenizer.json") in found(copy)


def test_a_directory_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="not a dataset"):
        list(check_dataset(tmp_path))
