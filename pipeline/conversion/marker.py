"""The results of a part of a conversion, mostly a shard: its progress, its samples left out, and its marker."""

import json
from collections.abc import Iterator
from typing import Literal, NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from ..._version import __version__
from ...storage.place import Place
from ...storage.sealed_json import DamagedJSONError, parse, seal_line, unseal
from ..dataset.index import SHARD_SUFFIXES, ShardSuffix
from ..errors import DatasetError
from ..sources import BadSample, Unused

PartSuffix = ShardSuffix | Literal["errors.jsonl", "done.json"]


def stem(part: int, shard: int) -> str:
    """Return what tells a shard's file names apart, in dataset.json as well: 00012, 00012.1, … are of part 12."""
    return f"{part:05d}.{shard}" if shard else f"{part:05d}"


class ShardResult(NamedTuple):
    """One shard of a part."""

    rows: int
    digests: dict[str, str]
    """File suffix -> sha256."""
    sizes: dict[str, int]
    """File suffix -> bytes."""
    captions: int
    captions_per_sample: int
    """Maximum captions per sample."""
    etags: dict[str, str]
    """File suffix -> ETag of the object; empty outside object stores, and before it is published."""


class SampleCounts(NamedTuple):
    """Numbers of samples, of a part or of all."""

    left_out: int = 0
    truncated: int = 0
    """Captions that were truncated."""
    blank: int = 0
    """Pictures of one colour."""
    ignored: int = 0
    """Captions that are not wanted."""
    in_tars: int = 0
    """Pictures that stay in their tars."""
    nearly_black: int = 0
    nearly_white: int = 0
    without_class: int = 0


class Counts(NamedTuple):
    """Progress of the conversion."""

    done: int
    """What was processed of the source: samples, usable or not, or bytes of tars."""
    seen: int
    """Samples processed, usable or not."""
    left_out: int
    files: int = 0
    """Tars processed."""

    def plus(self, other: Self) -> Self:
        return type(self)(*map(sum, zip(self, other, strict=True)))


class PartResult(NamedTuple):
    """The result of one part; the content of its marker."""

    shards: tuple[ShardResult, ...]
    """Those with samples: mostly one."""
    found: SampleCounts
    errors_bytes: int
    """Size of errors.jsonl."""
    plan: int
    """Plan.made_at of the part's plan."""
    errors_etag: str = ""
    unused: dict[str, Unused] = {}  # noqa: RUF012  nobody changes it
    """Kind → what stands beside its samples and is not used, of a source that is read in order."""
    version: str = __version__
    """Version of thermopile that wrote the part: another may encode pictures differently."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def sealed(self) -> bytes:
        shards = [shard._asdict() for shard in self.shards]
        unused = {kind: each._asdict() for kind, each in self.unused.items()}
        return seal_line(self._asdict() | {"shards": shards, "found": self.found._asdict(), "unused": unused})


_RESULT = TypeAdapter(PartResult)


def read_marker(text: bytes, plan: int) -> PartResult | None:
    """Return the content of a marker; None if it is damaged, or has another version or plan."""
    try:
        result = _RESULT.validate_python(unseal(text))
    except (DamagedJSONError, ValidationError):
        return None
    keys = {*SHARD_SUFFIXES}
    is_complete = all(
        shard.sizes.keys() == shard.digests.keys() == shard.etags.keys() == keys for shard in result.shards
    )
    return result if is_complete and (result.version, result.plan) == (__version__, plan) else None


def line_of(sample: BadSample) -> str:
    """Return a line of errors.jsonl; lines follow the order of the ids that the samples would have had."""
    return json.dumps(sample._asdict(), ensure_ascii=False) + "\n"


def read_bad_samples(file: Place) -> Iterator[BadSample]:
    """Yield the lines of errors.jsonl. Raises DatasetError for a damaged line."""
    with file.opened() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield BadSample(**{name: str(text) for name, text in parse(line).items()})
            except (DamagedJSONError, AttributeError, TypeError) as error:
                raise DatasetError(f"{file}, line {number:,}, is damaged: {error}") from error
