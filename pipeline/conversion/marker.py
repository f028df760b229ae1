"""The marker of a finished part, mostly a shard: its content and its plan."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from ..._version import __version__
from ...storage.sealed_json import DamagedJSONError, seal_line, unseal
from ..dataset_index import SHARD_SUFFIXES, ShardSuffix

PartSuffix = ShardSuffix | Literal["errors.jsonl", "done.json"]
PART_SUFFIXES: tuple[PartSuffix, ...] = (*SHARD_SUFFIXES, "errors.jsonl")
"""Files written before the marker."""


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


class Found(NamedTuple):
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

    @classmethod
    def sum_of(cls, parts: Sequence[Self]) -> Self:
        return cls(*map(sum, zip(*parts, strict=True)))


class PartResult(NamedTuple):
    """The result of one part; the content of its marker."""

    shards: tuple[ShardResult, ...]
    """Those with samples: mostly one."""
    found: Found
    errors_bytes: int
    """Size of errors.jsonl."""
    plan: int
    """Plan.made_at of the part's plan."""
    errors_etag: str = ""
    version: str = __version__
    """Version of thermopile that wrote the part: another may encode pictures differently."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def sealed(self) -> bytes:
        shards = [shard._asdict() for shard in self.shards]
        return seal_line(self._asdict() | {"shards": shards, "found": self.found._asdict()})


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
