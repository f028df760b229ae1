"""Count repeated captions and pictures after all samples of a dataset are converted."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import reduce
from tempfile import TemporaryFile

import numpy as np

from ...storage.arrays import Uint64s
from ...storage.place import Place
from ..dataset.index import SHARD_FOLDER, Content, DatasetIndex
from ..dataset.row_records import RECORD
from ..errors import DatasetError

FILES_AT_ONCE = 16
SORTED_AT_ONCE = 10_000_000
"""Above this number of samples, checksums are distributed over files in TMPDIR by their highest bits, and sorted file
by file."""
JPEG, TOKENS = "jpeg_checksum", "tokens_checksum"


def row_records_of(place: Place, index: DatasetIndex) -> list[Place]:
    return [place / SHARD_FOLDER / index.shard_name(shard, "rows") for shard in range(len(index.shard_digests))]


def content_of(row_records: Sequence[Place], samples: int, *, pairs: bool, blank: int | None) -> Content:
    """Count equal checksums in about 16 bytes of memory a sample, at most for SORTED_AT_ONCE of them at a time.

    row_records: the .rows files of all shards, in order. blank: as in Content. Raises DatasetError if they do not hold
    that number of samples, OSError.
    """
    copies, _, most_copied, _ = _repeats(row_records, samples, JPEG)
    repeats, captions, with_caption, most = _repeats(row_records, samples, TOKENS) if pairs else (0, 0, 0, None)
    return Content(
        samples=samples,
        sharing_captions=repeats + captions,
        with_caption=with_caption,
        caption_sample=0 if most is None else _first(row_records, TOKENS, most),
        copies=copies,
        most_copied=most_copied,
        blank=blank,
    )


def shared(row_records: Sequence[Place], others: Sequence[Place], field: str) -> int:
    """Return how many samples have a checksum that samples in other .rows files have, too. Raises OSError."""
    own = np.concatenate([*_checksums(row_records, field)])
    return int(reduce(np.logical_or, (np.isin(own, other) for other in _checksums(others, field))).sum())


def _repeats(row_records: Sequence[Place], samples: int, field: str) -> tuple[int, int, int, np.uint64 | None]:
    """Return how many samples repeat an earlier checksum, and how many checksums are repeated; then how many samples
    have the most frequent checksum, and that checksum. 0 each, and None, if none is repeated."""
    bits = max(0, (samples - 1) // SORTED_AT_ONCE).bit_length()
    found, repeats, repeated, most, most_frequent = 0, 0, 0, 0, np.uint64(0)
    with ExitStack() as open_files:
        parts = [open_files.enter_context(TemporaryFile()) for _ in range(1 << bits)]
        for checksums in _checksums(row_records, field):  # each into the file of its highest bits
            found += len(checksums)
            of_part = (checksums >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(checksums), int)
            checksums = checksums[np.argsort(of_part, kind="stable")]
            pieces = np.split(checksums, np.cumsum(np.bincount(of_part, minlength=len(parts)))[:-1])
            for part, piece in zip(parts, pieces, strict=True):
                part.write(piece.data)
        if found != samples:
            raise DatasetError(f"the .rows files beside {row_records[0]} hold {found:,} samples, not {samples:,}")
        for part in parts:
            part.seek(0)
            ordered = np.fromfile(part, "<u8")
            ordered.sort()
            values, counts = np.unique(ordered[1:][ordered[1:] == ordered[:-1]], return_counts=True)
            repeats, repeated = repeats + int(counts.sum()), repeated + len(values)
            if len(counts) and counts.max() > most:
                most, most_frequent = int(counts.max()), values[counts.argmax()]
    return (repeats, repeated, 1 + most, most_frequent) if most else (0, 0, 0, None)


def _first(row_records: Sequence[Place], field: str, wanted: np.uint64) -> int:
    before = 0
    for checksums in _checksums(row_records, field):
        if len(places := np.flatnonzero(checksums == wanted)):
            return before + int(places[0])
        before += len(checksums)
    raise DatasetError(f"the .rows files beside {row_records[0]} changed while they were read")


def _checksums(row_records: Sequence[Place], field: str) -> Iterator[Uint64s]:
    """Yield the checksums of each file, a few of which are read at a time."""

    def read(place: Place) -> Uint64s:
        data = place.read_bytes()
        return np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)[1:][field].copy()

    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        for first in range(0, len(row_records), FILES_AT_ONCE):
            yield from threads.map(read, row_records[first : first + FILES_AT_ONCE])
