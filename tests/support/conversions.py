"""Datasets that tests convert, and what a conversion writes."""

import hashlib

from thermopile.pipeline.conversion.conversion import Conversion, ConvertSettings
from thermopile.pipeline.conversion.shard_pool import processes
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.place import place_of


def dataset_of(source, out, selection=None, tokenizer_from=None, **settings):
    """Convert a source into a dataset at `out`, in this process."""
    settings = ConvertSettings(**settings)
    Conversion(source, out, settings, selection, tokenizer_from, pool=in_this_process).run()
    return Dataset(out)


def append_glyphs(path, selection):
    """Append glyphs of these numbers to a dataset of glyphs."""
    from thermopile.pipeline.conversion.append import appended_path, join

    dataset_of(GlyphSource(0), appended_path(path), selection, tokenizer_from=path / "tokenizer.json")
    join(path)


def convert_part(source, out, settings, number, count, workers=1, pool=None, **options):
    """Convert part `number` of `count`. options: fields of Conversion, and arguments of its method `part`."""
    watching = {name: options.pop(name) for name in ("on_progress", "tell", "on_begun") if name in options}
    return Conversion(source, out, settings, pool=pool or processes(workers), **options).part(number, count, **watching)


def finish(source, out, settings, **options):
    return Conversion(source, out, settings, **options).finish()


def digests(root):
    """The sha256 of every file of a folder or below an address, by name."""
    root = place_of(root)
    names = sorted(name for name, _, _ in root.listing())
    return {name: hashlib.sha256((root / name).read_bytes(1 << 30)).hexdigest() for name in names}


def many_shards(monkeypatch, rows):
    monkeypatch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_ROWS", rows)
    monkeypatch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_BYTES", 1)


def in_this_process(job, parts, counted, on_progress):
    """A pool that writes the parts here, so that what a test replaces is replaced there too."""
    from thermopile.pipeline.conversion.shard_pool import writer_of
    from thermopile.pipeline.conversion.shard_writer import write_part

    counts = [counted]
    writer = writer_of(job, lambda more: counts.append(counts.pop().plus(more)))
    for part, work in parts:
        write_part(part, work, writer)
        on_progress(counts[0])
