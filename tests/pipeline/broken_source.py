"""Sources that break as no source should, for workers to import."""

from thermopile.pipeline.glyphs import GlyphSource


class BrokenSource(GlyphSource):
    """Has a defect that shows at one sample."""

    def __getitem__(self, index):
        if index == 34:
            raise ZeroDivisionError("a defect of the source")
        return super().__getitem__(index)
