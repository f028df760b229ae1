"""What disks do to files, and what is done to samples."""

import shutil

import numpy as np

from thermopile.pipeline.dataset.row_records import RECORD
from thermopile.pipeline.opening import Dataset


def cut_short(file, keep=20):
    file.write_bytes(file.read_bytes()[:keep])


def flip(file, bit=400):
    """Change one bit, counted from the file's first."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def scribble(file, spans):
    data = bytearray(file.read_bytes())
    for first, size in spans:
        data[int(first) : int(first) + int(size)] = b"\xff" * int(size)
    file.write_bytes(data)


def overwritten(dataset, ids, to):
    """A copy of a dataset with other bytes in place of these samples' pictures, tokens and records."""
    shutil.copytree(dataset.path, to)
    copy, (shards, rows) = Dataset(to), dataset.locate(ids)
    for number in np.unique(shards).tolist():
        here, spans = rows[shards == number], []
        for at in copy.shard(number).records(here):
            spans += [(at["jpeg_at"], at["jpeg_bytes"]), (at["tokens_at"], 4 * copy.index.tokenizer.context_length)]
        beton, table = (to / "shards" / copy.index.shard_name(number, kind) for kind in ("beton", "rows"))
        scribble(beton, spans)
        scribble(table, [((row + 1) * RECORD.itemsize, RECORD.itemsize) for row in here.tolist()])  # after a header
    return Dataset(to)
