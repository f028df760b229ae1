"""Sources that break as no source should, for workers to import."""

import resource

from thermopile.pipeline.sources.glyphs import GlyphSource

MAX_BYTES = 1_000_000


class FillsTheDiskSource(GlyphSource):
    """Lets a worker write files of a megabyte at most, so that further writes fail as on a full disk."""

    def __getitem__(self, index):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, hard))
        return super().__getitem__(index)


class BrokenSource(GlyphSource):
    """Has a defect that shows at one sample."""

    def __getitem__(self, index):
        if index == 34:
            raise ZeroDivisionError("a defect of the source")
        return super().__getitem__(index)
