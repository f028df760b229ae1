"""A source and an augmentation of one's own, and what the dataset says afterwards:

PYTHONPATH=examples thermopile convert own_source:Discs 500 data/discs
PYTHONPATH=examples thermopile train --data data/discs --out runs/discs --set data.recipe=own_source:GENTLE
python examples/own_source.py data/discs
"""

import sys
from collections import Counter

from PIL import Image, ImageDraw

import thermopile

COLOURS = ("red", "green", "blue")
GENTLE = thermopile.Recipe(scale=(0.8, 1), jitter=0.5, brightness=0.2, contrast=0.2, flip=0.5)


class Discs(thermopile.Source):
    """Discs of three colours on white, each with a caption; SRC is their number."""

    mode = "pairs"

    def __init__(self, src):
        self.count = int(src)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        colour, radius = COLOURS[index % 3], 4 + index % 11
        picture = Image.new("RGB", (32, 32), "white")
        ImageDraw.Draw(picture).ellipse((16 - radius, 16 - radius, 16 + radius, 16 + radius), fill=colour)
        caption = f"a {colour} disc of radius {radius}"
        return thermopile.Sample(self.uri(index), self.key(index), picture, caption, group=colour)

    def uri(self, index):
        return f"disc:{index}"

    def key(self, index):
        return str(index)

    def captions(self, indices):  # to train the tokenizer
        return (self[index].caption for index in indices)

    def describe(self):  # recorded in dataset.json
        return {"discs": self.count}


def main(data):
    dataset = thermopile.Dataset(data)
    print(len(dataset), "samples:", dict(sorted(Counter(dataset.column("group").to_pylist()).items())))
    for row in dataset.rows([0, 1]):
        print(row["sample_id"], row["uri"], row["caption"])


if __name__ == "__main__":
    main(*sys.argv[1:])
