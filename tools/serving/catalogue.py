"""The index of a run's samples, beside its report: state, ranks of tau, kinds and classes as arrays, texts in SQLite.

RUN/report/index/ holds texts-…/ for the dataset, state-…/ for the snapshot served last, and margin-…/ for the features
served last, each a directory that is renamed into place once it is whole.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...state_store.schema import VISITS
from ...storage.files import open_regular, own_directory, read_regular, refuse_link, write_atomically
from ...storage.sealed_json import DamagedJSONError, seal_line, unseal
from ...trainer.errors import RunError
from ..inspection import OnTask
from ..inspection.features.features_file import FeaturesFile
from ..inspection.features.neighbours import margins
from ..inspection.opening import Inspection, read_blocks
from ..inspection.temperatures.correlation import NO_GROUP
from ..inspection.temperatures.groups import CLASS_COLUMN, TooManyGroupsError, codes_of
from ..inspection.temperatures.kinds import KIND_NAMES, KindRules
from ..inspection.temperatures.whole_run import WholeRun
from .texts import Texts, damaged, write_texts

INDEX = "index"
_FORMAT = 1
_STATE = "state-4"
"""4: kinds by the state alone, and planted samples."""
_TEXTS, _GROUPS, _ABOUT, _KIND, _MISFITS = "texts.sqlite", "class.npy", "about.json", "kind.npy", "misfits.npy"
_MARGIN, _BY_MARGIN = "margin.npy", "by-margin.npy"
_NOT_SELECTED = len(KIND_NAMES)
SERVED_KINDS = (*KIND_NAMES, "not_selected")
"""Names of the kinds, by code; the last is for samples that the run does not train on."""
_LARGEST = 1 << 32
"""Ids are kept as uint32."""

Ids = NDArray[np.uint32]


@dataclass(frozen=True)
class Catalogue:
    """The index of one snapshot, n samples; arrays are mapped into memory and read as they are used."""

    columns: dict[str, NDArray[Any]]
    """Every column of the state, by id: float32 or uint32 [n]."""
    kinds: NDArray[np.int8]
    """int8 [n]: places in SERVED_KINDS."""
    coldest: dict[str, Ids]
    """Side -> ids by tau, and by log s among equals, uint32 [n]; those without a usable tau come last."""
    taus: dict[str, NDArray[np.float32]]
    """Side -> tau in that order, float32 [n]; inf for those without."""
    misfits: Ids
    """uint32 [n]: ids by log s over the whole run, highest first; empty without log s."""
    classes: list[str]
    """Names, sorted; empty without classes, or with too many to list."""
    class_of: NDArray[np.int32] | None
    """int32 [n]: places in `classes`, -1 without one."""
    texts: Texts | None
    """None without the dataset."""
    margin: NDArray[np.float32] | None = None
    """float32 [n], as `margins` makes them; None without features of pairs."""
    by_margin: Ids | None = None
    """uint32 [n]: ids by margin, lowest first."""

    @property
    def samples(self) -> int:
        return len(self.kinds)

    def close(self) -> None:
        if self.texts:
            self.texts.close()


def open_catalogue(inspection: Inspection, folder: Path, on_progress: OnTask) -> Catalogue:
    """Open the index in RUN/report/index, or make the parts of it that are missing; takes 16 bytes a sample meanwhile.

    folder: RUN/report. Raises RunError without a snapshot or if the index is damaged, DatasetError, DamagedChunkError,
    NotRegularFileError if a part of it is a link.
    """
    reader, dataset = inspection.reader, inspection.dataset
    if reader is None:
        raise RunError(f"{inspection.run.path} has no snapshot of its state yet; the first checkpoint writes one")
    if reader.samples >= _LARGEST:
        raise RunError(f"{reader.samples:,} samples are too many to serve; use --export")
    index = own_directory(own_directory(folder) / INDEX)
    of_state, of_texts = index / f"{_STATE}-{reader.snapshot.id}", index / f"texts-{reader.dataset_fingerprint[:16]}"
    if not of_state.exists():
        with _made(of_state) as being_made:
            _index_state(inspection, being_made, on_progress)
    if dataset and not of_texts.exists():
        with _made(of_texts) as being_made:
            write_texts(dataset, being_made / _TEXTS, partial(on_progress, "indexing captions"))
            _index_classes(inspection, being_made, on_progress)
    _remove_older(of_state)
    return _opened(inspection, of_state, of_texts if dataset else None)


def with_margins(catalogue: Catalogue, features: FeaturesFile, folder: Path, on_progress: OnTask) -> Catalogue:
    """Return the catalogue with the margins of features of pairs, which are indexed in RUN/report/index once.

    folder: RUN/report, where `catalogue` was opened. Raises RunError if index or features are damaged,
    NotRegularFileError.
    """
    count, of = features.samples, own_directory(folder / INDEX) / f"margin-{features.of.digest[:16]}"
    about: dict[str, int | str] = {"samples": count, "digest": features.of.digest}
    if not of.exists():
        with _made(of) as being_made:
            found = margins(features, partial(on_progress, "comparing pairs with negatives"))
            _new(being_made / _MARGIN, np.float32, count)[:] = found
            _new(being_made / _BY_MARGIN, np.uint32, count)[:] = np.argsort(found, kind="stable")
            write_atomically(being_made / _ABOUT, seal_line({"format": _FORMAT, **about}))
    _remove_older(of)
    _check(of, about)
    by_margin = _mapped(of / _BY_MARGIN, np.uint32, count)
    return replace(catalogue, margin=_mapped(of / _MARGIN, np.float32, count), by_margin=by_margin)


def _remove_older(part: Path) -> None:
    """Remove the parts of snapshots or features served before this one."""
    for other in part.parent.glob(f"{part.name.partition('-')[0]}-*"):
        if other != part and not other.is_symlink():
            shutil.rmtree(other)


def _opened(inspection: Inspection, of_state: Path, of_texts: Path | None) -> Catalogue:
    reader, sides = inspection.reader, inspection.sides
    assert reader is not None
    count = reader.samples
    about = _check(of_state, {"samples": count, "snapshot": reader.snapshot.id})
    inspection.notes[:] = dict.fromkeys([*inspection.notes, *map(str, about.get("notes", ()))])
    columns = {
        name: _mapped(of_state / _file(name), np.float32 if name in reader.fields else np.uint32, count)
        for name in reader.columns
    }
    has_score = any(name.endswith("/log_s") for name in reader.fields)
    classes: list[str] = []
    if of_texts:
        about = _check(of_texts, {"samples": count, "fingerprint": reader.dataset_fingerprint})
        classes = [str(name) for name in about["classes"]]
    return Catalogue(
        columns,
        _mapped(of_state / _KIND, np.int8, count),
        {side: _mapped(of_state / f"{side}.coldest.npy", np.uint32, count) for side in sides},
        {side: _mapped(of_state / f"{side}.tau-sorted.npy", np.float32, count) for side in sides},
        _mapped(of_state / _MISFITS, np.uint32, count) if has_score else np.empty(0, np.uint32),
        classes,
        _mapped(of_texts / _GROUPS, np.int32, count) if of_texts and classes else None,
        Texts(_regular(of_texts / _TEXTS)) if of_texts else None,
    )


def _index_state(inspection: Inspection, folder: Path, on_progress: OnTask) -> None:
    reader, noted = inspection.reader, len(inspection.notes)
    assert reader is not None
    count = reader.samples
    rules = KindRules.of(inspection)
    new = {
        name: _new(folder / _file(name), np.float32 if name in reader.fields else np.uint32, count)
        for name in reader.columns
    }
    kinds, ranks = _new(folder / _KIND, np.int8, count), np.empty(count, np.float32)
    whole_run = WholeRun(inspection, partial(on_progress, "reading all snapshots"))
    for block, rows in read_blocks(reader, reader.columns):
        for name, values in rows.items():
            new[name][block.start : block.stop] = values
        kept = reader.is_kept(block.start, block.stop)
        kinds[block.start : block.stop] = np.where(kept, rules.kinds(rows, block), _NOT_SELECTED)
        ranks[block.start : block.stop] = np.where(rules.are_planted(block), np.inf, whole_run.ranks(block))
        on_progress("indexing the state", block.stop, count)
    for done, side in enumerate(inspection.sides):
        on_progress("ranking by tau", done * count, len(inspection.sides) * count)
        _write_ranks(folder, side, new, count)
    if rules.log_s:
        _new(folder / _MISFITS, np.uint32, count)[:] = np.argsort(ranks, kind="stable")
    about = {"format": _FORMAT, "samples": count, "snapshot": reader.snapshot.id, "notes": inspection.notes[noted:]}
    write_atomically(folder / _ABOUT, seal_line(about))


def _write_ranks(folder: Path, side: str, columns: dict[str, NDArray[Any]], count: int) -> None:
    tau, log_s = columns[f"{side}/tau"], columns.get(f"{side}/log_s")
    usable = (columns[VISITS] > 0) & np.isfinite(tau)
    keys = np.where(usable, tau, np.float32(np.inf))
    order = np.argsort(keys, kind="stable") if log_s is None else np.lexsort((log_s, keys))
    _new(folder / f"{side}.coldest.npy", np.uint32, count)[:] = order
    _new(folder / f"{side}.tau-sorted.npy", np.float32, count)[:] = keys[order]


def _index_classes(inspection: Inspection, folder: Path, on_progress: OnTask) -> None:
    """Write every sample's class; without names if there are more classes than can be listed."""
    dataset = inspection.dataset
    assert dataset is not None
    try:
        codes, names = codes_of(dataset, CLASS_COLUMN, partial(on_progress, "indexing classes"))
    except TooManyGroupsError:
        codes, names = np.full(dataset.n, NO_GROUP, np.int32), []
    _new(folder / _GROUPS, np.int32, dataset.n)[:] = codes
    about = {"format": _FORMAT, "samples": dataset.n, "fingerprint": dataset.index.fingerprint, "classes": names}
    write_atomically(folder / _ABOUT, seal_line(about))


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """Give a new directory beside `folder` that is renamed to it when the block ends, or removed if it fails."""
    being_made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".being-made-"))
    try:
        yield being_made
        being_made.rename(folder)
    except BaseException:
        shutil.rmtree(being_made, ignore_errors=True)
        raise


def _check(folder: Path, expected: dict[str, int | str]) -> dict[str, Any]:
    """Return the description of a part of the index. Raises RunError if it does not match."""
    refuse_link(folder)
    try:
        about = unseal(read_regular(folder / _ABOUT, 64 << 20))
        if {name: about.get(name) for name in expected} == expected and about.get("format") == _FORMAT:
            return about
    except (DamagedJSONError, OSError) as error:
        raise damaged(folder, error) from error
    raise damaged(folder, f"{_ABOUT} does not belong to this run")


def _regular(path: Path) -> Path:
    """Return the path of a part of the index. Raises NotRegularFileError for a link, RunError for a pipe or nothing."""
    refuse_link(path)
    try:
        open_regular(path).close()  # opening a pipe otherwise would wait for ever, in SQLite beyond Ctrl-C
    except OSError as error:
        raise damaged(path, error) from error
    return path


def _mapped(path: Path, dtype: DTypeLike, count: int) -> NDArray[Any]:
    _regular(path)
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    if array.dtype != dtype or array.shape != (count,):
        raise damaged(path, f"it is {array.dtype} {array.shape}, not {np.dtype(dtype)} ({count},)")
    return array


def _new(path: Path, dtype: DTypeLike, count: int) -> NDArray[Any]:
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=(count,))


def _file(column: str) -> str:
    return f"{column.replace('/', '.')}.npy"
