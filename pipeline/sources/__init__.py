"""The interface of sources. A new source is one file, one entry in tools/convert_sources.py and one test."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import BadSampleError

MAX_MARKS = 16_384
"""Each mark has one or two file names: a plan with all of them stays far below the read limit."""


class Sample(NamedTuple):
    """One sample from a source."""

    uri: str
    """Human-readable origin; valid UTF-8."""
    key: str
    """The source's own name for it."""
    picture: bytes | Image.Image
    """A file's undecoded bytes, or a generated picture."""
    caption: str | None
    group: str | None
    """Class or folder, if any."""
    further_captions: tuple[str, ...] = ()
    """Further captions besides `caption`."""
    altered: str | None = None
    """How the source altered the sample on purpose; None if unaltered."""
    tar_at: int | None = None
    """Offset of the picture in its tar, which is to keep it; None if the dataset stores it."""

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions, `caption` first; empty if there are none."""
        return () if self.caption is None else (self.caption, *self.further_captions)


class BadSample(NamedTuple):
    """A sample that cannot be used, as a line of errors.jsonl has it."""

    uri: str
    key: str
    reason: str


class Read(NamedTuple):
    """A sample that was read, or bytes of a source without one."""

    source_index: int
    sample: Sample | BadSample | None
    done: int = 1
    """What progress counts: samples, or bytes of a source that is read in order."""
    files: int = 0
    """Files that end here."""
    ignored: bool = False
    """Whether it has a caption that is not wanted."""


class Groups(NamedTuple):
    """The class of every sample, known without reading pictures."""

    names: tuple[str, ...]
    """The classes in the source's order, or sorted if it has none.

    The empty name stands for samples without a class; their Sample.group is None.
    """
    of_sample: NDArray[np.int32]
    """int32 [n]: index into names."""


class Source(Protocol):
    """A listing of samples, sent to the worker processes: it must be compact and picklable.

    source[i] raises BadSampleError if sample i cannot be read. Subclasses inherit all that is not abstract.
    """

    mode: str
    """`images` or `pairs`."""
    alters: bool = False
    """Whether the source alters samples on purpose. The samples table then has the column `altered`."""
    unchanged_since: int = 1 << 63
    """Start of the conversion, in nanoseconds since 1970. A picture file changed later is refused."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def uri(self, index: int) -> str:
        """Return the origin of sample i, even if it cannot be read."""

    @abstractmethod
    def key(self, index: int) -> str:
        """Return the source's own name for sample i."""

    def groups(self) -> Groups | None:
        """Return the samples' classes; None if the source has none."""
        return None

    def read(self, work: Any) -> Iterator[Read]:
        """Yield the samples of these indices, int64 [k], in their order."""
        for index in work.tolist():
            try:
                yield Read(index, self[index])
            except BadSampleError as error:
                yield Read(index, BadSample(self.uri(index), self.key(index), str(error)))

    def captions(self, indices: NDArray[np.int64]) -> Iterable[str]:
        """Yield all captions of these samples, to train a tokenizer; none if the mode is `images`.

        Unreadable captions are skipped.
        """
        return ()

    def chunks(self) -> NDArray[np.int64] | None:
        """Return prefix sums, int64 [chunks + 1], of chunks whose samples are cheap only if read in sequence.

        None if random access costs the same.
        """
        return None

    def stored_bytes(self) -> int | None:
        """Return the bytes of all pictures in the source, for an estimate; None if unknown."""
        return None

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return dataset.json's record of the source, as JSON values.

        If the listing can change, this includes `listing`, its sha256, by which a resumed conversion notices changes of
        the source.
        """

    def marks(self) -> dict[str, str]:
        """Return marks that reveal changed files, by name. A conversion is resumed only if all marks are equal."""
        return {}


def marks_of(name_of: Callable[[int], str], versions: Sequence[object]) -> dict[str, str]:
    """Return Source.marks for files and their versions; above MAX_MARKS files, neighbours share a mark."""
    marks, together = {}, max(1, -(-len(versions) // MAX_MARKS))
    for first in range(0, len(versions), together):
        some = [*versions[first : first + together]]
        last = f" … {name_of(first + len(some) - 1)}" if len(some) > 1 else ""
        marks[name_of(first) + last] = hashlib.sha256(repr(some).encode()).hexdigest()[:16]
    return marks
