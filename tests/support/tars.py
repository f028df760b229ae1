"""WebDataset tars, and what a source reads from them."""

import io
import tarfile
import threading

import webdataset

from thermopile.pipeline.sources import Piece
from thermopile.pipeline.sources.webdataset import TarWork, WebDatasetSource

from support.pictures import as_bytes, draw


def write_shard(path, samples):
    with webdataset.TarWriter(str(path), mtime=0) as tar:
        for sample in samples:
            tar.write(sample)
    return path


def packed(*members):
    """The bytes of a tar of these members in this order, whatever they are called."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def write_members(path, *members):
    path.write_bytes(packed(*members))
    return path


def numbered(numbers):
    return [{"__key__": f"{n:06}", "jpg": b"pixels %d" % n, "txt": f"caption {n}", "cls": n % 3} for n in numbers]


def drawn(numbers, **more):
    """Samples with a picture that can be converted, a caption, and one of three classes; more: further members."""
    return [
        {"__key__": f"{n:06}", "jpg": as_bytes(draw(n), "JPEG"), "txt": f"caption {n}", "cls": n % 3} | more
        for n in numbers
    ]


def whole(source, tar):
    return Piece(tar, 0, int(source.sizes()[tar]), 0)


def reads_of(source, *pieces, number=0, seed=0, mode="", selected=None):
    """What the source reads in these pieces, in the order in which it yields it; without pieces, all tars."""
    pieces = pieces or tuple(whole(source, tar) for tar in range(len(source.tars)))
    return [*source.read(TarWork(number, pieces, seed, mode, selected))]


def samples_of(source, *pieces):
    """The samples and bad samples in these pieces, or in all tars, in their order in the tars."""
    reads = [read for read in reads_of(source, *pieces, mode=source.sampled(0).mode) if read.sample is not None]
    return [read.sample for read in sorted(reads, key=lambda read: read.source_index)]


class HeldSample:
    """The part of a conversion that samples the tars first waits until another one tells that it waits for that."""

    def __init__(self, monkeypatch):
        self.begun, self._awaited = threading.Event(), threading.Event()
        self.sampled, self.told = [], []
        beginning = WebDatasetSource._beginning

        def held(source, tar, most):
            self.sampled.append(tar)
            self.begun.set()
            assert self._awaited.wait(60)
            return beginning(source, tar, most)

        monkeypatch.setattr(WebDatasetSource, "_beginning", held)

    def tell(self, words):
        self.told.append(words)
        if words.startswith("waiting for "):
            self._awaited.set()

    def was_awaited(self):
        return any(words.endswith(", which begins the conversion …") for words in self.told)
