"""What conversion asks of a source of samples. A new source is one file, one line in the command's table, one test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

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


class Source(Protocol):
    """A listing of samples, sent to the worker processes: it must be small and picklable.

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

    def captions(self) -> Iterable[str]:
        """Every caption, for training a tokenizer; none where the mode is `images`."""

    def describe(self) -> dict[str, Any]:
        """What dataset.json records of the source; JSON values."""
