"""Sources that are hostile, broken, slow or large. Processes that convert import them by their names."""

import os
import resource
import time

import numpy as np
from PIL import Image

from thermopile.benchmarks.made import PairSource
from thermopile.pipeline.sources import Sample, Source
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)> '&amp;'",
    "\u202egnp.elif\u202c and \u2066isolated\u2069",
    "NUL \x00, bell \x07, escape \x1b[31mred\x1b[0m",
    "long " + "x" * 10_000,
    "family \U0001f468\u200d\U0001f469\u200d\U0001f467 and \u0645\u0631\u062d\u0628\u0627",
    "</style></title>]]><!-- ${7*7} [bold]rich[/bold] $\\frac{1}{2}$",
)
SIZES = (34, 16, 8, 4, 2, 1)
"""Samples of each class; the last sample of all has no class and no caption."""


class HostileSource(Source):
    """66 small pictures, whose texts try to break a page: the captions take turns, class k is named after text k."""

    mode = "pairs"

    def __init__(self):
        self.classes = [*np.repeat(np.arange(len(SIZES)), SIZES).tolist(), None]

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        known = self.classes[index] is not None
        return Sample(
            uri=self.uri(index),
            key=str(index),
            picture=Image.fromarray(pixels),
            caption=HOSTILE[index % len(HOSTILE)] if known else None,
            group=f"class {self.classes[index]} {HOSTILE[self.classes[index]]}" if known else None,
        )

    def sample(self, index, unchanged_since):
        return self[index]  # unchecked, since a pair without a caption is left out

    def uri(self, index):
        return f"{HOSTILE[index % len(HOSTILE)]}.jpg"

    def key(self, index):
        return str(index)

    def groups(self):
        return None

    def chunks(self):
        return None

    def stored_bytes(self):
        return None

    def captions(self, indices):
        return HOSTILE

    def describe(self):
        return {"kind": "hostile"}


class NoiseSource(PairSource):
    """`samples` pairs of about 4 KB each, every one of its own, in shards of 4 MB or more."""

    def __getitem__(self, index: int) -> Sample:
        pixels = np.random.default_rng(index).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        return super().__getitem__(index)._replace(picture=Image.fromarray(pixels))

    def stored_bytes(self) -> int:
        return len(self) * 4096


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


class _OfTwoWordsError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class UnreadableErrorSource(GlyphSource):
    """Raises what another process cannot read."""

    def __getitem__(self, index):
        raise _OfTwoWordsError("a", "defect")


class UnreadableSource(GlyphSource):
    """Cannot be read by another process."""

    def __setstate__(self, state):
        raise ValueError("a defect of its state")


class _ToldSource(FolderSource):
    """A folder of pictures that does what files in the folder `told` say."""

    def __init__(self, root, told):
        super().__init__(root)
        self.told = told


class PausingSource(_ToldSource):
    """Gives no sample while as many shards of `told`/out are done as the file `pause_at` says."""

    def sample(self, index, unchanged_since):
        if self.is_to_pause():
            mark = self.told / f"pausing-{os.getpid()}"
            mark.touch()
            while self.is_to_pause():
                time.sleep(0.05)
            mark.unlink()
        return super().sample(index, unchanged_since)

    def is_to_pause(self):
        done = list(self.told.glob(".out.partial/parts/*.done.json"))
        return len(done) >= int((self.told / "pause_at").read_text())


class FailingOnceSource(_ToldSource):
    """Fails at the first sample, as a file server may that is away for a moment."""

    def sample(self, index, unchanged_since):
        try:
            (self.told / "fail_once").unlink()
        except FileNotFoundError:
            return super().sample(index, unchanged_since)
        raise OSError(5, "Input/output error", "somewhere")


class DeadlySource(_ToldSource):
    """Has a sample that kills whatever process reads it."""

    def sample(self, index, unchanged_since):
        if index == 100:
            os._exit(1)
        return super().sample(index, unchanged_since)
