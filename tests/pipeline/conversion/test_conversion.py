"""Conversion: a dataset directory that appears whole or not at all, the same whatever the number of workers."""

import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.errors import DatasetError, DatasetExistsError, SourceError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.sources.parquet import ParquetSource

from support.conversions import digests, many_shards
from support.pictures import draw
from support.sources import BrokenSource, FillsTheDiskSource, UnreadableErrorSource, UnreadableSource


def test_ids_are_dense_and_each_leads_to_the_pixels_of_its_source(images_dataset, picture_folder):
    assert images_dataset.n == 300
    rows = images_dataset.rows(range(300))
    assert sorted(row["uri"] for row in rows) == sorted(
        str(p.relative_to(picture_folder)) for p in picture_folder.rglob("*.png")
    )
    shard, place = images_dataset.locate(np.arange(300))
    source = FolderSource(picture_folder)
    for sample_id in range(0, 300, 23):
        (record,) = images_dataset.shard(shard[sample_id]).records(place[[sample_id]])
        assert source.uri(record["source_index"]) == rows[sample_id]["uri"]
        original = np.asarray(Image.open(picture_folder / rows[sample_id]["uri"])).astype(int)
        stored = np.asarray(Image.open(io.BytesIO(images_dataset.jpeg(sample_id)))).astype(int)
        assert np.abs(stored - original).mean() < 8
        assert (rows[sample_id]["height"], rows[sample_id]["width"]) == original.shape[:2]


def test_classes_do_not_lie_together_in_the_order_of_the_ids(images_dataset):
    groups = np.array(images_dataset.column("group").to_pylist())
    assert set(groups) == {"cats", "dogs"}
    assert 0.5 < (groups[:150] == "cats").mean() < 0.85  # 2/3 of all are cats


def test_pairs_carry_the_caption_and_its_tokens(pairs_dataset):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pairs_dataset.tokenizer_path))
    for row in pairs_dataset.rows([0, 700, 1999]):
        shard, place = pairs_dataset.locate(np.array([row["sample_id"]]))
        tokens = pairs_dataset.shard(shard[0]).tokens(place)
        assert tokens.shape == (1, pairs_dataset.index.tokenizer.context_length)
        assert tokenizer.decode(tokens[0].tolist()) == row["caption"]


def test_a_picture_whose_captions_do_not_fit_a_page_is_a_bad_sample(tmp_path, picture_folder):
    picture = (picture_folder / "cats" / "000.png").read_bytes()
    captions = [["a cat"], [f"cat {n}" for n in range(64)]]
    pq.write_table(pa.table({"image": [picture] * 2, "caption": captions}), tmp_path / "in.parquet")
    settings = ConvertSettings(context_length=10_000, max_error_rate=0.5)
    summary = convert(ParquetSource([tmp_path / "in.parquet"]), tmp_path / "out", settings, workers=1)
    assert (summary.index.n, summary.index.total_captions, summary.index.captions_per_sample, summary.left_out) == (
        1,
        1,
        1,
        1,
    )
    reason = r"its JPEG of [\d,]+ bytes and 64 captions of 10,000 tokens do not fit 2,097,152 bytes; lower --context"
    assert re.search(reason, (tmp_path / "out" / "errors.jsonl").read_text())


def test_several_workers_and_shards_write_the_same_bytes_as_one(tmp_path, monkeypatch):
    many_shards(monkeypatch, rows=50)
    source, selection = GlyphSource(0, test=True), np.arange(0, 2000, 10)
    for name, workers in (("one", 1), ("two", 2)):
        convert(source, tmp_path / name, ConvertSettings(), workers=workers, selection=selection)
    assert Dataset(tmp_path / "one").shards == 4
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_altered_samples_are_told_in_a_column_of_their_own_whatever_the_workers(tmp_path, monkeypatch):
    many_shards(monkeypatch, rows=50)
    source = GlyphSource(0, swap=0.1, duplicate=0.1)
    selection = np.arange(0, len(source), 60)
    for name, workers in (("one", 1), ("two", 2)):
        convert(source, tmp_path / name, ConvertSettings(), workers=workers, selection=selection)
    dataset = Dataset(tmp_path / "one")
    assert dataset.shards > 1
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    told = dict(zip(dataset.column("key").to_pylist(), dataset.column("altered").to_pylist(), strict=True))
    assert told == {source.key(i): source[i].altered for i in selection.tolist()}
    assert {(word or "none").split()[0] for word in told.values()} == {"none", "swapped", "duplicate"}
    assert list(check_dataset(dataset.path)) == []


def test_the_samples_table_of_a_source_that_alters_nothing_has_no_such_column(pairs_dataset):
    assert "altered" not in pairs_dataset.schema.names


def test_another_seed_gives_other_ids_and_another_fingerprint(picture_folder, images_dataset, tmp_path):
    convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(seed=1), workers=1)
    other = Dataset(tmp_path / "out")
    assert other.index.fingerprint != images_dataset.index.fingerprint
    assert other.column("uri").to_pylist() != images_dataset.column("uri").to_pylist()


@pytest.fixture(scope="module")
def half_bad(tmp_path_factory):
    """Good pictures, one of another format than its name says, an empty file, a cut one and a page of HTML."""
    root = tmp_path_factory.mktemp("mixed") / "in"
    root.mkdir()
    for i in range(20):
        draw(i).save(root / f"good{i:02d}.jpg")
    (root / "empty.png").write_bytes(b"")
    (root / "page.jpg").write_bytes(b"<html>not found</html>")
    (root / "cut.jpg").write_bytes((root / "good00.jpg").read_bytes()[:300])
    draw(99).save(root / "really_png.jpg", "PNG")
    out = root.parent / "out"
    return convert(FolderSource(root), out, ConvertSettings(max_error_rate=0.2), workers=1)


def test_ids_stay_dense_where_samples_are_left_out(half_bad):
    dataset = Dataset(half_bad.path)
    uris = [row["uri"] for row in dataset.rows(range(21))]
    shards, rows = dataset.locate(np.arange(21))
    source_index = [dataset.shard(s).records()["source_index"][r] for s, r in zip(shards, rows, strict=True)]
    listing = sorted([*(f"good{i:02d}.jpg" for i in range(20)), "empty.png", "page.jpg", "cut.jpg", "really_png.jpg"])
    assert [listing[i] for i in source_index] == uris


def test_a_source_without_one_usable_sample_makes_no_dataset(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"no")
    with pytest.raises(SourceError, match=r"none of the 1 samples is usable.*a\.png"):
        convert(FolderSource(tmp_path / "in"), tmp_path / "out", ConvertSettings(max_error_rate=1), workers=1)
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_is_refused_and_stays_as_it_was(tmp_path, picture_folder):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").write_text("dear …")
    for overwrite in (False, True):
        with pytest.raises(DatasetExistsError):
            convert(FolderSource(picture_folder), tmp_path / "mine", ConvertSettings(), workers=1, overwrite=overwrite)
    assert (tmp_path / "mine" / "letters.txt").read_text() == "dear …"


def test_overwriting_replaces_a_dataset_only_once_the_new_one_is_whole(tmp_path, images_dataset, picture_folder):
    out = tmp_path / "out"
    shutil.copytree(images_dataset.path, out)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no")
    with pytest.raises(SourceError):
        convert(FolderSource(tmp_path / "bad"), out, ConvertSettings(), workers=1, overwrite=True)
    assert Dataset(out).index.fingerprint == images_dataset.index.fingerprint
    convert(FolderSource(picture_folder), out, ConvertSettings(seed=5), workers=1, overwrite=True)
    assert Dataset(out).index.fingerprint != images_dataset.index.fingerprint
    assert sorted(os.listdir(tmp_path)) == ["bad", "out"]


def test_only_the_selected_samples_are_converted(tmp_path, picture_folder):
    selection = np.arange(5, 300, 7)
    convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(), workers=1, selection=selection)
    np.testing.assert_array_equal(np.sort(Dataset(tmp_path / "out").shard(0).records()["source_index"]), selection)


def test_a_test_set_is_encoded_with_the_tokenizer_of_its_training_set(tmp_path, pairs_dataset):
    source = GlyphSource(1, test=True)
    convert(source, tmp_path / "out", ConvertSettings(context_length=8), workers=1, selection=np.arange(100),
            tokenizer_from=pairs_dataset.tokenizer_path)  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == pairs_dataset.tokenizer_path.read_bytes()
    info = Dataset(tmp_path / "out").index.tokenizer
    assert info.context_length == 8
    assert info.truncated > 0


@pytest.mark.wide
def test_a_script_whose_calls_have_no_guard_is_told_to_write_one(tmp_path, picture_folder):
    script = tmp_path / "script.py"
    script.write_text(f"import thermopile\nthermopile.convert({str(picture_folder)!r}, {str(tmp_path / 'out')!r})\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("there it must stand below `if __name__ == '__main__':`")
    script.write_text(script.read_text().replace("\nthermo", "\nif __name__ == '__main__': thermo"))
    subprocess.run([sys.executable, script], capture_output=True, check=True)


def test_a_worker_that_is_killed_ends_the_conversion_and_what_was_done_is_kept(tmp_path, picture_folder, monkeypatch):
    def kill_the_worker(counts):
        for process in multiprocessing.active_children():
            process.kill()

    many_shards(monkeypatch, rows=25)  # some are still to be written at the first call
    source, out = FolderSource(picture_folder), tmp_path / "out"
    with pytest.raises(DatasetError, match="fewer --workers"):
        convert(source, out, ConvertSettings(), workers=1, on_progress=kill_the_worker)
    assert os.listdir(tmp_path) == [".out.partial"]
    convert(source, out, ConvertSettings(), workers=1, resume=True)
    convert(source, tmp_path / "whole", ConvertSettings(), workers=1)
    assert Dataset(out).index.fingerprint == Dataset(tmp_path / "whole").index.fingerprint


@pytest.mark.wide
def test_no_process_outlives_a_conversion_on_one_core(tmp_path, picture_folder):
    """It would hold the pipe that the output is read from."""
    words = [str(picture_folder), str(tmp_path / "out"), "--workers", "1"]
    one_core = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    program = f"{one_core}; from thermopile.tools.cli import main; main(['convert', 'folder', *{words!r}])"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)


def test_a_defect_of_a_source_ends_the_conversion_with_its_cause(tmp_path, monkeypatch):
    many_shards(monkeypatch, rows=25)
    source, selection = BrokenSource(0, test=True), np.arange(100)
    with pytest.raises(ZeroDivisionError, match="a defect of the source") as error:
        convert(source, tmp_path / "out", ConvertSettings(), workers=2, selection=selection)
    assert "support/sources.py" in str(error.value.__cause__)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (UnreadableErrorSource, DatasetError, "^_OfTwoWordsError: a defect$"),
        (UnreadableSource, ValueError, "^a defect of its state$"),
    ],
)
def test_whatever_a_worker_raises_is_told_even_if_another_process_cannot_read_it(tmp_path, kind, error, said):
    source = kind(0, test=True)
    with pytest.raises(error, match=said):
        convert(source, tmp_path / "out", ConvertSettings(), workers=1, selection=np.arange(20))


def test_a_full_disk_is_named_with_the_way_on(tmp_path, capfd):
    full, settings, selection = FillsTheDiskSource(0, test=True), ConvertSettings(), np.arange(100)
    with pytest.raises(
        DatasetError, match=rf"cannot write to {tmp_path}: .*continue with the same command and --resume"
    ):
        convert(full, tmp_path / "out", settings, workers=1, selection=selection)
    assert os.listdir(tmp_path) == [".out.partial"]
    source = GlyphSource(0, test=True)
    assert convert(source, tmp_path / "out", settings, workers=1, selection=selection, resume=True).index.n == 100
    assert "leaked" not in capfd.readouterr().err


def test_a_bad_sample_stops_the_conversion_if_asked_and_it_resumes_once_fixed(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(5):
        draw(i).save(tmp_path / "in" / f"{i}.jpg")
    (tmp_path / "in" / "3.jpg").write_bytes(b"")
    source, settings = FolderSource(tmp_path / "in"), ConvertSettings(on_error="fail")
    with pytest.raises(SourceError, match=r"'3\.jpg': the file is empty.*--on-error skip"):
        convert(source, tmp_path / "out", settings, workers=1)
    draw(3).save(tmp_path / "in" / "3.jpg")
    assert convert(source, tmp_path / "out", settings, workers=1, resume=True).index.n == 5


@pytest.mark.parametrize("workers", [1, 2])
def test_too_many_bad_samples_stop_the_conversion_with_reasons_and_a_list(tmp_path, monkeypatch, workers):
    many_shards(monkeypatch, rows=5)
    (tmp_path / "in").mkdir()
    for i in range(20):
        draw(i).save(tmp_path / "in" / f"{i:02d}.jpg")
    for i in (3, 7, 11):
        (tmp_path / "in" / f"{i:02d}.jpg").write_bytes(b"")
    source, out = FolderSource(tmp_path / "in"), tmp_path / "out"
    with pytest.raises(SourceError, match=r"3 of 20 samples.*allows 0\.1 .*\.jpg': the file is empty.*higher --max-"):
        convert(source, out, ConvertSettings(max_error_rate=0.1), workers=workers)
    assert len((tmp_path / ".out.partial" / "errors.jsonl").read_text().splitlines()) == 3
    summary = convert(source, out, ConvertSettings(max_error_rate=0.15), workers=workers, resume=True)
    assert (summary.index.n, summary.left_out) == (17, 3)


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "copy does not exist"),
        (lambda d: (d / "dataset.json").unlink(), "not a dataset"),
        (lambda d: (d / "dataset.json").write_text("{"), "cannot be used"),
        (lambda d: edit(d / "dataset.json", "300", "299"), "checksum does not match. Convert the dataset again"),
        (lambda d: (d / "shards" / "shard-00000.rows").unlink(), r"shard-00000\.rows is missing"),
        (lambda d: (d / "shards" / "shard-00000.beton").unlink(), r"shard-00000\.beton is missing"),
    ],
)  # fmt: skip
def test_a_damaged_dataset_is_refused_by_name(tmp_path, images_dataset, damage, message):
    shutil.copytree(images_dataset.path, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(DatasetError, match=message):
        Dataset(tmp_path / "copy")


def test_an_id_out_of_range_is_an_error_and_never_wraps(images_dataset):
    for sample_id in (-1, 300):
        with pytest.raises(DatasetError, match="0 to 299"):
            images_dataset.locate(np.array([0, sample_id]))


def test_a_folder_that_no_conversion_left_is_kept(tmp_path, picture_folder):
    partial, replaced = tmp_path / ".out.partial", tmp_path / ".out.replaced"
    for folder in (partial, replaced):
        folder.mkdir()
        (folder / "mine").write_text("mine")
    with pytest.raises(DatasetExistsError, match=r"\.out\.partial was not left by a conversion; rename it"):
        convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(), workers=1)
    partial.rename(tmp_path / "kept")
    for _ in range(2):
        convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(), workers=1, overwrite=True)
    assert sorted(path.name for path in tmp_path.glob("*")) == [".out.replaced", "kept", "out"]
    assert [(folder / "mine").read_text() for folder in (tmp_path / "kept", replaced)] == ["mine"] * 2
