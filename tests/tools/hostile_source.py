"""A source whose captions, class names and file names try to break a page. Importable by conversion's processes."""

import numpy as np
from PIL import Image

from thermopile.pipeline.sources import Sample, Source

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
    """66 small pictures; the captions take turns, class k is named after text k."""

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
