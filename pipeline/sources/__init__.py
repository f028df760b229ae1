"""What conversion asks of a source of samples. A new source is one file, one line in the command's table, one test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image


class Sample(NamedTuple):
    """One sample as its source has it."""

    uri: str
    """Where it comes from, for people; valid UTF-8."""
    key: str
    """The source's own name for it."""
    picture: bytes | Image.Image
    """A file's bytes, not yet decoded, or a picture drawn here."""
    caption: str | None
    group: str | None
    """Class or folder, where there is one."""


class Groups(NamedTuple):
    """The class of every sample of a source, known without reading a picture."""

    names: tuple[str, ...]
    """The classes, in the source's own order, or sorted where it has none.

    The empty name stands for the samples without a class; their Sample.group is None.
    """
    of_sample: NDArray[np.int32]
    """int32 [n]: index into names."""


class Source(Protocol):
    """A listing of samples, sent to the worker processes: it must be compact and picklable.

    source[i] raises BadSampleError where sample i cannot be read.
    """

    @property
    def mode(self) -> str:
        """`images` or `pairs`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def uri(self, index: int) -> str:
        """Where sample i comes from, also where it cannot be read."""

    def key(self, index: int) -> str:
        """The source's own name for sample i."""

    def groups(self) -> Groups | None:
        """The samples' classes; None where the source has no classes."""

    def captions(self, indices: NDArray[np.int64]) -> Iterable[str]:
        """The captions of these samples, for training a tokenizer; none where the mode is `images`.

        A caption that cannot be read is passed over.
        """

    def chunks(self) -> NDArray[np.int64] | None:
        """Prefix sums, int64 [chunks + 1], of samples that are cheap only when read one after the other.

        None where any sample can be read at any time at the same cost.
        """

    def stored_bytes(self) -> int | None:
        """Bytes of all pictures as the source holds them, for an estimate; None where that is not known."""

    def describe(self) -> dict[str, Any]:
        """What dataset.json records of the source; JSON values.

        Among them `listing`, a sha256 of the sorted listing where it can change, by which a conversion that goes on
        sees that the source is no longer the same.
        """
