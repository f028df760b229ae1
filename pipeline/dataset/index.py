"""dataset.json, the index of a dataset. See docs/formats.md."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from ...storage.arrays import Int64s
from ...storage.bucket_errors import MissingBucketError, ObjectStoreError
from ...storage.place import AnyPlace, place_of
from ...storage.sealed_json import DamagedJSONError, seal_document, unseal
from ..errors import CURE, DatasetError

FORMAT = 2
INDEX_FILE = "dataset.json"
SHARD_FOLDER = "shards"
TOKENIZER_FILE = "tokenizer.json"
ERRORS_FILE = "errors.jsonl"
FINGERPRINT = "thermopile.dataset_fingerprint"
"""Key in the metadata of Parquet files that name samples of a dataset."""
FINGERPRINT_COLUMN = "dataset_fingerprint"
"""Column of such files with the same text in every row: other programs keep columns, but no metadata."""

ShardSuffix = Literal["beton", "rows", "parquet"]
SHARD_SUFFIXES: tuple[ShardSuffix, ...] = ("beton", "rows", "parquet")

MAX_PIXELS = 89_478_485
"""Maximum pixels of a picture: Pillow's limit before it warns of a bomb, a quarter of a gigabyte as RGB."""

MAX_TAR_BYTES = (1 << 42) - 1
"""Maximum bytes of a tar, 4 TiB: a cache keeps the number of a tar, below MAX_TARS, and an offset in 63 bits."""
MAX_TARS = 1 << 20

_Count = Annotated[int, Field(ge=0, lt=1 << 56)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ImagePolicy(_Record):
    """How dataset.json says pictures are stored."""

    max_size: int = Field(default=512, ge=8)
    """Maximum short side in pixels; larger pictures are reduced to it."""
    quality: int = Field(default=90, ge=1, le=100)
    """JPEG quality of re-encoded pictures."""
    max_pixels: int = Field(default=MAX_PIXELS, ge=1)
    """Larger pictures are left out, since a few bytes may claim any size. Recorded only if it was changed."""

    @model_serializer(mode="wrap")
    def _without_usual_limit(self, fields: SerializerFunctionWrapHandler) -> dict[str, int]:
        return {key: value for key, value in fields(self).items() if (key, value) != ("max_pixels", MAX_PIXELS)}


class TokenizerInfo(_Record):
    """Token properties that an encoder needs."""

    vocab_size: int = Field(ge=1, lt=1 << 31)
    """The highest token id plus 1."""
    context_length: int = Field(ge=1, le=1 << 19)
    """Tokens per caption, padded or cut to this length."""
    end_id: _Count
    """The token that closes every caption: padding follows its first occurrence, and CLIP's tower pools from it."""
    truncated: _Count = 0
    """Captions that were truncated to context_length."""


class Content(_Record):
    """Repeated content of a dataset. Captions are equal if their tokens are: the text encoder sees only the tokens."""

    samples: _Count
    """Samples counted; fewer than all once an earlier version, which does not count, has appended samples."""
    sharing_captions: _Count
    """Samples whose captions another sample has too; 0 without captions."""
    with_caption: _Count
    """Samples with the most frequent captions; 0 if none are repeated."""
    caption_sample: _Count
    """The first of these samples."""
    copies: _Count
    """Samples whose JPEG equals an earlier sample's, byte for byte."""
    most_copied: _Count
    """Samples with the most frequent JPEG; 0 if none is repeated."""
    blank: _Count | None
    """Pictures of one colour; None if an earlier version, which did not count them, converted some samples."""


class Tar(NamedTuple):
    """A tar that holds pictures of a dataset in place."""

    name: str
    """Path below the root."""
    size: Annotated[int, Field(ge=0, le=MAX_TAR_BYTES)]
    """Bytes."""
    version: str | int
    """ETag of an object; time of a file's last change, in nanoseconds."""


class Tars(_Record):
    """The tars whose pictures a dataset in place does not copy."""

    root: str
    """Absolute path or address at the conversion."""
    files: Annotated[tuple[Tar, ...], Field(min_length=1, max_length=MAX_TARS)]

    @cached_property
    def bytes(self) -> Int64s:
        """Sizes of the tars, int64 [tars]."""
        return np.array([tar.size for tar in self.files], np.int64)


class DatasetIndex(_Record):
    """Content of dataset.json, which is written last: a directory without it is not a dataset."""

    format: Literal[2]
    n: _Count
    """Number of samples; their ids are 0 … n-1."""
    mode: Literal["images", "pairs"]
    captions_per_sample: int = Field(ge=0, le=1 << 16)
    """Maximum captions per sample; 0 in a dataset of images only."""
    captions: _Count | None = None
    """Number of captions if a sample has several; None if every sample has captions_per_sample."""
    first_id: tuple[_Count, ...]
    """Prefix sums of the shards' rows, shards + 1 numbers: sample_id = first_id[shard] + row."""
    shards: tuple[Annotated[str, Field(pattern=r"^[0-9]{5,9}(\.[0-9]{1,9})?$")], ...] | None = None
    """`shard_names`; None if they are 00000, 00001, …"""
    tars: Tars | None = None
    """Set if the dataset is in place: its shards hold only the pictures that conversion has changed."""
    image: ImagePolicy
    tokenizer: TokenizerInfo | None
    tokenizer_digest: _Digest | None
    """sha256 of tokenizer.json; None without captions."""
    shard_digests: tuple[dict[str, _Digest], ...]
    """For each shard, file suffix -> sha256."""
    grown_from: _Digest | None
    """Fingerprint of the dataset that this one extends."""
    source: dict[str, Any]
    """The converted source. `appended` lists later additions, each with `first_id` and `fingerprint`, the number of
    samples and the fingerprint before it; `content`: see there."""
    fingerprint: _Digest
    """sha256 of everything that determines ids, pixels and tokens: equal if these are equal."""

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The record of each source: the first, then the appended ones."""
        appended = self.source.get("appended")
        later = appended if isinstance(appended, list) else []
        return [self.source, *(each for each in later if isinstance(each, dict))]

    @property
    def predecessors(self) -> dict[str, int]:
        """Fingerprints of the datasets that samples were appended to -> their numbers of samples, oldest first."""
        found = ((each.get("fingerprint"), each.get("first_id")) for each in self.sources[1:])
        return {name: first for name, first in found if isinstance(name, str) and isinstance(first, int)}

    def before(self, fingerprints: Collection[str]) -> Self:
        """Return the index from before samples were appended, if one of these was its fingerprint; else itself."""
        then = [(name, n) for name, n in self.predecessors.items() if name in fingerprints and n in self.first_id[1:-1]]
        if self.fingerprint in fingerprints or not then:
            return self
        fingerprint, n = then[-1]
        shards, earlier = self.first_id.index(n), [each for each in self.sources[1:] if each.get("first_id", n) < n]
        return self.model_copy(
            update={
                "n": n,
                "captions": None,
                "first_id": self.first_id[: shards + 1],
                "shards": self.shard_names[:shards],
                "shard_digests": self.shard_digests[:shards],
                "source": self.source | {"appended": earlier},
                "fingerprint": fingerprint,
            }
        )

    @property
    def content(self) -> Content | None:
        """Repeated content; None if it was not counted. Earlier versions refuse new keys, except in `source`."""
        with suppress(ValidationError):
            content = Content.model_validate(self.source.get("content"))
            counts = content.model_dump(exclude={"samples"}, exclude_none=True).values()
            return content if content.samples == self.n > content.caption_sample and max(counts) <= self.n else None
        return None

    @property
    def total_captions(self) -> int:
        return self.n * self.captions_per_sample if self.captions is None else self.captions

    @property
    def shard_names(self) -> tuple[str, ...]:
        """What tells the names of the shards' files apart."""
        return self.shards or usual_names(len(self.shard_digests))

    def shard_files(self) -> Iterator[str]:
        return (self.shard_name(shard, suffix) for shard in range(len(self.shard_digests)) for suffix in SHARD_SUFFIXES)

    def shard_name(self, shard: int, suffix: ShardSuffix) -> str:
        return shard_name(self.shards[shard] if self.shards else shard, suffix)


def shard_name(shard: int | str, suffix: ShardSuffix) -> str:
    """Return the name of the file of shard 00000, 00001, …, or of a shard with a name of its own."""
    return f"shard-{shard if isinstance(shard, str) else f'{shard:05d}'}.{suffix}"


def is_plain_name(name: str) -> bool:
    """Return whether a tar's name stays below its root wherever it is used."""
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & {*name.split("/")}


def usual_names(shards: int) -> tuple[str, ...]:
    return tuple(f"{shard:05d}" for shard in range(shards))


def seal_index(index: Mapping[str, Any]) -> bytes:
    """Return dataset.json for the fields of a DatasetIndex, adding `format` and `fingerprint`.

    Raises DatasetError if the fields are not a valid index.
    """
    tree = {"format": FORMAT, **index}
    if (names := tree.get("shards")) is None or names == usual_names(len(names)):
        tree.pop("shards", None)  # earlier versions know only these names
    if tree.get("tars") is None:
        tree.pop("tars", None)  # which earlier versions refuse
    tree["fingerprint"] = _fingerprint(tree)
    text = seal_document(tree)
    parse_index(text)
    return text


def read_index(path: AnyPlace) -> DatasetIndex:
    """Read and validate a dataset's dataset.json. Raises DatasetError if the place is not a dataset."""
    file = place_of(path) / INDEX_FILE
    try:
        return parse_index(file.read_bytes())
    except MissingBucketError as error:
        raise DatasetError(str(error)) from None
    except FileNotFoundError:
        what = f"is not a dataset: it has no {INDEX_FILE}" if file.parent.is_folder() else "does not exist"
        raise DatasetError(f"{path} {what}. Create a dataset with `thermopile convert`.") from None
    except ObjectStoreError:
        raise
    except (DatasetError, OSError) as error:
        cure = f". {CURE}" if isinstance(error, DatasetError) else ""
        raise DatasetError(f"{file} cannot be used: {error}{cure}") from error


def parse_index(text: bytes) -> DatasetIndex:
    """Validate the text of a dataset.json. Raises DatasetError."""
    try:
        tree = unseal(text)
        json.dumps(tree, ensure_ascii=False).encode()  # a lone surrogate would crash any code that prints it
        # Validate as JSON, in which a list may fill a tuple; strict Python values may not.
        index = DatasetIndex.model_validate_json(json.dumps(tree))
    except DamagedJSONError as error:
        raise DatasetError(str(error)) from error
    except UnicodeEncodeError:
        raise DatasetError("it contains half of a surrogate pair, which is not text") from None
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise DatasetError(f"{where}: {wrong['msg']}{more}") from error
    _refuse_contradictions(index)
    if _fingerprint(tree) != index.fingerprint:
        raise DatasetError("its fingerprint does not match its content")
    return index


def _refuse_contradictions(index: DatasetIndex) -> None:
    first_id = np.array(index.first_id, np.int64)
    if len(first_id) < 2 or first_id[0] != 0 or first_id[-1] != index.n or (np.diff(first_id) <= 0).any():
        raise DatasetError(f"first_id does not hold the prefix sums of the shards' rows up to n = {index.n}")
    if len(index.shard_digests) != len(first_id) - 1:
        raise DatasetError(f"shard_digests has {len(index.shard_digests)} shards, first_id {len(first_id) - 1}")
    if any(digests.keys() != set(SHARD_SUFFIXES) for digests in index.shard_digests):
        raise DatasetError(f"shard_digests does not list {', '.join(sorted(SHARD_SUFFIXES))} of every shard")
    if index.shards is not None and not len(index.shards) == len(set(index.shards)) == len(first_id) - 1:
        raise DatasetError(f"shards does not name each of the {len(first_id) - 1} shards once")
    with_captions = {index.mode == "pairs", index.tokenizer is not None, index.captions_per_sample > 0}
    if len(with_captions) > 1 or (index.tokenizer is None) != (not index.tokenizer_digest):
        raise DatasetError("mode, captions_per_sample, tokenizer and tokenizer_digest contradict each other")
    if index.tars and not index.tars.root.isprintable():
        raise DatasetError(f"tars has the root {index.tars.root!r}, which is not a path or an address")
    for name, *_ in index.tars.files if index.tars else ():
        if not is_plain_name(name):
            raise DatasetError(f"tars names {name!r}, which is not a plain name below their root")
    if index.captions is not None and not index.n <= index.captions <= index.n * index.captions_per_sample:
        raise DatasetError(
            f"{index.captions} captions do not fit {index.n} samples of at most {index.captions_per_sample} captions"
        )


def _fingerprint(tree: Mapping[str, Any]) -> str:
    """Return the sha256 of everything that determines ids, pixels and tokens, but not names, classes, caption texts."""
    kept = {
        name: tree[name]
        for name in ("format", "n", "mode", "captions_per_sample", "first_id", "tokenizer", "tokenizer_digest")
    }
    if tree["grown_from"] is not None:
        kept["grown_from"] = tree["grown_from"]
    if (tars := tree.get("tars")) is not None:  # wherever they are
        kept["tars"] = [[name, size] for name, size, _ in tars["files"]]
    kept["shards"] = [{name: digests.get(name) for name in ("beton", "rows")} for digests in tree["shard_digests"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
