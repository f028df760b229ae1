"""The size of a dataset, estimated before it is made."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

from thermopile.pipeline.conversion import dataset_size
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.dataset_size import dataset_bytes
from thermopile.pipeline.sources.cifar import CifarSource
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.pipeline.sources.source_file import SourceFile
from thermopile.pipeline.sources.webdataset import WebDatasetSource

from support.pictures import as_bytes
from support.tars import write_members

NEVER_BELOW, NEVER_ABOVE = 0.9, 1.7
WORDS = "the big little old red green blue house cat tree car sun sea hill road bird fish on with of".split()  # noqa: SIM905


def photo(width, height, rng):
    coarse = Image.fromarray(rng.integers(0, 256, (-(-height // 16), -(-width // 16), 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    return Image.fromarray((smooth + rng.integers(-8, 9, smooth.shape)).clip(0, 255).astype(np.uint8))


def kept(rng):
    return as_bytes(photo(*rng.integers(200, 400, 2), rng), "JPEG", quality=int(rng.integers(60, 95)))


def resized(rng):
    return as_bytes(photo(*rng.integers(600, 900, 2), rng), "JPEG")


def one_colour(rng):
    return as_bytes(Image.new("RGB", (48, 48), tuple(rng.integers(0, 256, 3).tolist())), "PNG")


def icon(rng):
    drawn = Image.new("RGBA", (48, 48))
    for x, y, size, *colour in rng.integers(3, 40, (rng.integers(1, 6), 6)).tolist():
        ImageDraw.Draw(drawn).ellipse((x, y, x + size, y + size), fill=(*(6 * c for c in colour), 255))
    return as_bytes(drawn, "PNG")


def noise(rng):
    return as_bytes(Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)), "PNG")


def grey(rng):
    return as_bytes(photo(120, 100, rng).convert("L"), str(rng.choice(["PNG", "JPEG"])))


def gif_or_webp(rng):
    return as_bytes(photo(120, 100, rng), str(rng.choice(["GIF", "WEBP"])))


def tiny_or_huge(rng):
    return as_bytes(photo(1000, 900, rng) if rng.random() < 0.03 else photo(32, 32, rng), "JPEG")


def long_tailed(rng):
    side = int(np.exp(rng.normal(4.2, 1)).clip(8, 1500))
    return as_bytes(photo(side, side, rng), "JPEG")


def caption(rng):
    return " ".join(rng.choice(WORDS, rng.integers(3, 12)))


def folder(root, make, count):
    rng = np.random.default_rng(0)
    for i in range(count):  # sorted by class, as folders are
        (root / f"class {5 * i // count}").mkdir(exist_ok=True)
        (root / f"class {5 * i // count}" / f"picture-{i:06d}.jpg").write_bytes(make(rng))
    return FolderSource(root)


def parquet(root, make, count, captions=1):
    rng = np.random.default_rng(0)
    table = {"image": [make(rng) for _ in range(count)], "caption": [[caption(rng)] * captions for _ in range(count)]}
    pq.write_table(pa.table(table), root / "in.parquet", row_group_size=100)
    return ParquetSource([root / "in.parquet"])


def csv(root, make, count, captions):
    rng, lines = np.random.default_rng(0), ["filepath,title"]
    for i in range(count):
        (root / f"{i}.jpg").write_bytes(make(rng))
        lines += [f"{i}.jpg,{caption(rng)}" for _ in range(captions)]
    (root / "list.csv").write_text("\n".join(lines))
    return CsvSource(root / "list.csv")


def tars(root, make, count, **options):
    rng = np.random.default_rng(0)
    for tar in range(4):
        members = {}
        for i in range(count // 4):
            members |= {f"{tar}{i:06d}.jpg": make(rng), f"{tar}{i:06d}.txt": caption(rng).encode()}
            members[f"{tar}{i:06d}.json"] = json.dumps({"url": caption(rng)}).encode()
        write_members(root / f"{tar}.tar", *members.items())
    return WebDatasetSource([root / f"{tar}.tar" for tar in range(4)], **options)


def cifar(root):
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        pictures = [np.asarray(photo(32, 32, rng)).transpose(2, 0, 1).tobytes() for _ in range(1000)]
        (root / name).write_bytes(b"".join(bytes([i % 10]) + picture for i, picture in enumerate(pictures)))
    (root / "batches.meta.txt").write_text("\n".join(f"kind {i}" for i in range(10)))
    return CifarSource(root, test=False)


KINDS = {
    "a folder of PNGs of one colour": lambda root: folder(root, one_colour, 4_000),
    "a folder of JPEGs that are kept": lambda root: folder(root, kept, 1_000),
    "JPEGs that are made smaller": lambda root: folder(root, resized, 200),
    "icons in parquet": lambda root: parquet(root, icon, 4_000),
    "icons with five captions each": lambda root: parquet(root, icon, 3_000, captions=5),
    "PNGs of noise": lambda root: folder(root, noise, 3_000),
    "a csv with several captions per picture": lambda root: csv(root, kept, 200, captions=5),
    "tars": lambda root: tars(root, kept, 1_000),
    "tars in place": lambda root: tars(root, kept, 1_000, in_place=True),
    "tars of icons": lambda root: tars(root, icon, 4_000),
    "cifar": cifar,
    "glyphs": lambda root: GlyphSource(seed=0, test=False),
    "tiny and huge pictures": lambda root: folder(root, tiny_or_huge, 3_000),
    "sizes with a long tail": lambda root: folder(root, long_tailed, 1_500),
    "grey pictures": lambda root: folder(root, grey, 2_000),
    "GIF and WebP": lambda root: folder(root, gif_or_webp, 2_000),
}


def estimate_of(source, selection=None, settings=None):
    stored = source.stored_bytes()
    if selection is not None:
        stored = stored * len(selection) // len(source)
    return dataset_bytes(source, selection, settings or ConvertSettings(), stored)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However busy the machine is, all samples are stored, unless a test says otherwise."""
    monkeypatch.setattr(dataset_size, "SECONDS", 60.0)


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_hardly_below_the_size_of_the_dataset_and_not_far_above(tmp_path, kind):
    (tmp_path / "in").mkdir()
    source = KINDS[kind](tmp_path / "in")
    estimate = estimate_of(source)
    convert(source, tmp_path / "out", ConvertSettings(context_length=77 if "tars" in kind else 32))
    ratio = estimate / (tmp_path / "out").size_below()
    print(f"{kind}: {ratio:.3f}")
    assert NEVER_BELOW < ratio < NEVER_ABOVE


class CountedSource(GlyphSource):
    """Counts what is read of it."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


PAGE = 2 << 20
WHOLE = ConvertSettings(image={"max_size": 1000})


def of_noise(folder, count, quality):
    """A folder of equal JPEGs of 1000 × 1000 pixels, which take 0.76 MB at a quality of 85 and 1.8 MB at 98."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), np.uint8)
    for i in range(count):
        (folder / f"{i:02d}.jpg").write_bytes(as_bytes(Image.fromarray(pixels), "JPEG", quality=quality))
    return FolderSource(folder)


def test_no_row_crosses_a_page(tmp_path):
    for quality, pages in ((85, 6), (98, 12)):
        estimate = estimate_of(of_noise(tmp_path / str(quality), 12, quality), settings=WHOLE)
        assert (pages + 1) * PAGE < estimate < (pages + 1.1) * PAGE


def test_bad_pictures_of_the_sample_count_as_nothing(tmp_path):
    source = of_noise(tmp_path / "in", 30, 85)
    for i in range(0, 30, 3):
        (tmp_path / "in" / f"{i:02d}.jpg").write_bytes(b"")
    assert (10 + 1) * PAGE < estimate_of(source, settings=WHOLE) < (14 + 1) * PAGE  # 10, and the margin


def test_a_source_of_bad_pictures_alone_has_no_estimate(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"")
    assert estimate_of(FolderSource(tmp_path)) is None


def test_an_error_of_the_source_is_left_for_the_conversion():
    class Defect(GlyphSource):
        def __getitem__(self, index):
            raise ZeroDivisionError

    assert estimate_of(Defect(seed=0, test=True)) is None


def test_no_more_samples_are_stored_once_the_time_is_up(monkeypatch):
    source = CountedSource(seed=0, test=False)
    estimate_of(source)
    assert source.reads == dataset_size.SAMPLES
    monkeypatch.setattr(dataset_size, "SECONDS", 0.0)
    source.reads = 0
    assert estimate_of(source)
    assert source.reads == 2


def test_only_what_is_selected_counts(tmp_path):
    source = of_noise(tmp_path / "in", 24, 85)
    for i in range(12):
        (tmp_path / "in" / f"{i:02d}.jpg").write_bytes(one_colour(np.random.default_rng(i)))
    small, large = (estimate_of(source, np.arange(start, start + 12), WHOLE) for start in (0, 12))
    assert 2 * PAGE < small < 2.1 * PAGE
    assert 7 * PAGE < large < 7.1 * PAGE


def test_of_tars_little_more_is_read_than_the_samples_taken(tmp_path, monkeypatch):
    source, read = tars(tmp_path, kept, 400), []
    original = SourceFile.read

    def noting(file, at, count):
        data = original(file, at, count)
        read.append(len(data))
        return data

    monkeypatch.setattr(SourceFile, "read", noting)
    monkeypatch.setattr(SourceFile, "read_piece", None)
    monkeypatch.setattr(dataset_size, "SAMPLES", 20)
    assert estimate_of(source)
    assert 0 < sum(read) < 0.2 * source.stored_bytes()


def test_what_parquet_keeps_in_memory_is_not_kept_by_an_estimate(tmp_path):
    source = parquet(tmp_path, icon, 300)
    assert estimate_of(source)
    assert not source._kept
