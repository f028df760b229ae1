"""Append samples to a dataset: convert them to a dataset of their own, then move its shards behind the existing ones.

    .OUT.appended                  the dataset of the new samples, converted like any other
    .OUT.appended/joined.json      the grown dataset's dataset.json; once it exists, shards are moved

Readers see the old dataset until its dataset.json is replaced, which comes last.
"""

import os
import shutil
from contextlib import suppress
from typing import Any

from ...storage import files
from ...storage.local import LocalPath
from ..dataset.index import (
    ERRORS_FILE,
    INDEX_FILE,
    SHARD_FOLDER,
    SHARD_SUFFIXES,
    TOKENIZER_FILE,
    DatasetIndex,
    parse_index,
    read_index,
    seal_index,
)
from ..errors import DatasetError, DatasetExistsError
from .content import content_of, row_records_of
from .partial import claimed
from .plan import Plan

_JOINED = "joined.json"


def appended_path(out: LocalPath) -> LocalPath:
    """Return the folder in which samples to append to `out` are converted."""
    return out.with_name(f".{out.name}.appended")


def refuse_known(out: LocalPath, plan: Plan) -> None:
    """Raise DatasetExistsError if the same listing made the dataset or was appended before."""
    whole = plan.selection is None  # the record lacks the selection, but the whole listing contains any selection
    for each in read_index(out).sources:
        if each.get("plan") == plan.digest():
            raise DatasetExistsError(f"{out} holds these samples already")
        if whole and plan.source.items() <= each.items():
            some = f"{out} holds these samples already, or a selection of them"
            raise DatasetExistsError(f"{some}; append any others from a source of their own")


def refuse_ungrowable(out: LocalPath) -> None:
    """Raise DatasetError if `join` could append nothing to the dataset."""
    index = read_index(out)
    if index.tokenizer and files.sha256_of(out / TOKENIZER_FILE) != index.tokenizer_digest:
        raise DatasetError(f"{out / TOKENIZER_FILE} was changed after conversion; convert the dataset again")


def join(out: LocalPath) -> None:
    """Make the shards of `.OUT.appended` the last shards of `out`. May be repeated after a kill at any moment.

    Samples 0 … n - 1, their shards and the tokenizer stay unchanged. Raises DatasetExistsError if another process is
    joining or has joined the same samples, DatasetError if the two datasets do not fit together.
    """
    addition = appended_path(out)
    with claimed(out):  # nobody may replace `out` meanwhile
        with suppress(OSError):
            addition.rmdir()  # empty: a process was killed at its last step
        if not addition.exists():  # another process has joined it already
            return
        files.remove_leftovers(out)
        if not (addition / _JOINED).is_file():
            old, new = read_index(out), read_index(addition)
            if new.source.get("plan", "") in {each.get("plan") for each in old.sources}:  # another process was faster
                _remove(addition)
                raise DatasetExistsError(f"{out} holds these samples already")
            files.write_atomically(addition / _JOINED, _grown(out, old, new))
        joined = files.read_regular(addition / _JOINED)
        if files.read_regular(out / INDEX_FILE) != joined:
            if read_index(out).fingerprint != parse_index(joined).grown_from:
                raise DatasetError(f"{out} was replaced since the append began; remove {addition} and append again")
            _move_shards(addition, out)
            files.write_atomically(out / INDEX_FILE, joined)
        _remove(addition)


def is_joining(out: LocalPath) -> bool:
    """Return whether `join` was interrupted."""
    addition = appended_path(out)
    return (addition / _JOINED).is_file() or (addition.is_dir() and not any(addition.iterdir()))


def _remove(addition: LocalPath) -> None:
    """Remove the addition's folder; a kill leaves an empty folder, or its mark that it was joined."""
    for path in sorted(addition.iterdir(), key=lambda path: path.name == _JOINED):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    addition.rmdir()


def _grown(out: LocalPath, old: DatasetIndex, new: DatasetIndex) -> bytes:
    for name in ("format", "mode", "image", "tokenizer_digest"):
        if getattr(old, name) != getattr(new, name):
            raise DatasetError(f"{out} and the samples to append differ in {name}; convert them separately")
    if old.tars and not (new.tars and new.tars.files[: len(old.tars.files)] == old.tars.files):
        raise DatasetError(f"the samples to append were not numbered after the tars of {out}; append them again")
    tokenizer = (
        old.tokenizer
        and new.tokenizer
        and old.tokenizer.model_copy(update={"truncated": old.tokenizer.truncated + new.tokenizer.truncated})
    )
    blank = [index.content.blank if index.content else None for index in (old, new)]
    content = content_of(
        [*row_records_of(out, old), *row_records_of(appended_path(out), new)],
        old.n + new.n,
        pairs=old.mode == "pairs",
        blank=None if None in blank else sum(filter(None, blank)),
    )
    per_sample = max(old.captions_per_sample, new.captions_per_sample)
    above = max(int(name.partition(".")[0]) for name in old.shard_names)
    addition = new.source | {"first_id": old.n, "fingerprint": old.fingerprint}
    appended: list[Any] = [*old.source.get("appended", []), addition]
    return seal_index(
        {
            "n": old.n + new.n,
            "mode": old.mode,
            "captions_per_sample": per_sample,
            **({"captions": old.total_captions + new.total_captions} if per_sample > 1 else {}),
            "first_id": [*old.first_id, *(old.n + first for first in new.first_id[1:])],
            "image": old.image.model_dump(),
            "tokenizer": tokenizer.model_dump() if tokenizer else None,
            "tokenizer_digest": old.tokenizer_digest,
            "tars": new.tars and new.tars.model_dump(),
            "shards": (*old.shard_names, *(f"{above + shard:05d}" for shard in range(1, 1 + len(new.shard_digests)))),
            "shard_digests": [*old.shard_digests, *new.shard_digests],
            "grown_from": old.fingerprint,
            "source": old.source | {"appended": appended, "content": content.model_dump()},
        }
    )


def _move_shards(addition: LocalPath, out: LocalPath) -> None:
    added, joined = read_index(addition), parse_index(files.read_regular(addition / _JOINED))
    count = len(added.shard_digests)
    before = len(joined.shard_digests) - count
    files.own_directory(out / SHARD_FOLDER)
    for shard in range(count):
        for suffix in SHARD_SUFFIXES:
            file = addition / SHARD_FOLDER / added.shard_name(shard, suffix)
            to = out / SHARD_FOLDER / joined.shard_name(before + shard, suffix)
            if file.is_symlink() or not (file.exists() or to.exists()):
                raise DatasetError(f"{file} is missing or a link; remove {addition} and append again")
            if file.exists():
                file.rename(to)
    files.sync(out / SHARD_FOLDER)
    merged = addition / f"{ERRORS_FILE}.merged"
    if (addition / ERRORS_FILE).is_file():
        with files.written_aside(merged) as both:
            for file in (out / ERRORS_FILE, addition / ERRORS_FILE):
                with files.open_regular(file) as lines:
                    shutil.copyfileobj(lines, both)
        # First remove this file of errors, so that its lines are never merged twice.
        (addition / ERRORS_FILE).unlink()
    if merged.is_file():
        os.replace(merged, out / ERRORS_FILE)
        files.sync(out)
