"""The marker of a finished shard: its content and its plan."""

from typing import Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from ..._version import __version__
from ...storage.sealed_json import DamagedJSONError, unseal
from ..dataset_index import SHARD_SUFFIXES, ShardSuffix

PartSuffix = ShardSuffix | Literal["errors.jsonl", "done.json"]
PART_SUFFIXES: tuple[PartSuffix, ...] = (*SHARD_SUFFIXES, "errors.jsonl")
"""Files written before the marker."""


class ShardResult(NamedTuple):
    """The result of one shard; the content of its marker."""

    rows: int
    digests: dict[str, str]
    """File suffix -> sha256."""
    left_out: int
    truncated: int
    """Number of truncated captions."""
    blank: int
    """Number of pictures of one colour."""
    captions: int
    captions_per_sample: int
    """Maximum captions per sample."""
    sizes: dict[str, int]
    """File suffix -> bytes, errors.jsonl included."""
    plan: int
    """Plan.made_at of the shard's plan."""
    etags: dict[str, str]
    """File suffix -> ETag of the object; empty outside object stores."""
    version: str = __version__
    """Version of thermopile that wrote the shard: another may encode pictures differently."""


_RESULT = TypeAdapter(ShardResult)


def read_marker(text: bytes, plan: int) -> ShardResult | None:
    """Return the content of a marker; None if it is damaged, or has another version or plan."""
    try:
        result = _RESULT.validate_python(unseal(text))
    except (DamagedJSONError, ValidationError):
        return None
    is_complete = result.sizes.keys() == {*PART_SUFFIXES} and result.digests.keys() == {*SHARD_SUFFIXES}
    return result if is_complete and (result.version, result.plan) == (__version__, plan) else None
