"""Count repeated captions and pictures after all samples of a dataset are converted."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ...storage.place import Place
from ..dataset_index import Content
from ..errors import DatasetError

FILES_AT_ONCE = 16
_JPEG, _TOKENS = 5, 6
"""Words of 64 bits in row_records.RECORD, whose module takes a second to import: checksums of JPEG and tokens."""


def content_of(row_records: Sequence[Place], samples: int, *, pairs: bool, blank: int | None) -> Content:
    """Count equal checksums in about 17 bytes of memory a sample, besides FILES_AT_ONCE files of at most 8 MiB.

    row_records: the .rows files of all shards, in order. blank: as in Content. Raises DatasetError if they do not hold
    that number of samples, OSError.
    """
    copies, _, most_copied, _ = _repeats(row_records, samples, _JPEG)
    repeats, captions, with_caption, sample = _repeats(row_records, samples, _TOKENS) if pairs else (0, 0, 0, 0)
    return Content(
        samples=samples,
        sharing_captions=repeats + captions,
        with_caption=with_caption,
        caption_sample=sample,
        copies=copies,
        most_copied=most_copied,
        blank=blank,
    )


def _repeats(row_records: Sequence[Place], samples: int, word: int) -> tuple[int, int, int, int]:
    """Return how many samples repeat an earlier checksum, and how many checksums are repeated; then how many samples
    have the most frequent checksum, and the first of these samples. 0 each if none is repeated."""

    def read(place: Place) -> NDArray[np.uint64]:
        data = place.read_bytes()
        return np.frombuffer(data[: len(data) // 64 * 64], "<u8").reshape(-1, 8)[1:, word].copy()

    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        checksums = np.concatenate([*threads.map(read, row_records)])
    if len(checksums) != samples:
        raise DatasetError(f"the .rows files beside {row_records[0]} hold {len(checksums):,} samples, not {samples:,}")
    ordered = np.sort(checksums)
    values, counts = np.unique(ordered[1:][ordered[1:] == ordered[:-1]], return_counts=True)
    if not len(values):
        return 0, 0, 0, 0
    most = counts.argmax()
    return int(counts.sum()), len(values), 1 + int(counts[most]), int((checksums == values[most]).argmax())
