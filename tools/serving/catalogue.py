"""The index of a run's samples, beside its report, and queries: conditions on samples and their order.

State, ranks of tau, kinds and classes are arrays, texts are in SQLite.

RUN/report/index/ holds texts-…/ for the dataset, state-…/ for the snapshot served last, and margin-…/ for the features
served last, each a directory that is renamed into place once it is whole.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import BaseModel, ValidationError

from ...pipeline.opening import Dataset
from ...state_store.schema import VISITS
from ...storage.files import open_regular, own_directory, read_regular, refuse_link, write_atomically
from ...storage.sealed_json import DamagedJSONError, seal_line, unseal
from ...trainer.config import explained
from ...trainer.errors import ConfigError, RunError
from ..inspection import Bools, Float32s, OnTask
from ..inspection.features.features_file import FeaturesFile
from ..inspection.features.neighbours import margins
from ..inspection.opening import Inspection, read_blocks
from ..inspection.temperatures.correlation import NO_GROUP
from ..inspection.temperatures.groups import CLASS_COLUMN, TooManyGroupsError, codes_of
from ..inspection.temperatures.kinds import KIND_NAMES, KindRules
from ..inspection.temperatures.misfits import WholeRun
from .texts import MAX_MATCHES, Texts, damaged, write_texts

INDEX = "index"
_FORMAT = 1
_STATE = "state-5"
"""5: no sorted temperatures."""
_TEXTS, _ABOUT = "texts.sqlite", "about.json"
SERVED_KINDS = (*KIND_NAMES, "not_selected")
"""Names of the kinds, by code; the last is for samples that the run does not train on."""

Ids = NDArray[np.uint32]
Sort = Literal["coldest", "hottest", "misfits", "margin", "id"]
Arrays = dict[str, NDArray[Any]]
"""By name; each is a file of a part of the index."""


@dataclass(frozen=True)
class Catalogue:
    """The index of one snapshot, n samples; arrays are mapped into memory and read as they are used."""

    columns: dict[str, NDArray[Any]]
    """Every column of the state, by id: float32 or uint32 [n]."""
    kinds: NDArray[np.int8]
    """int8 [n]: places in SERVED_KINDS."""
    coldest: dict[str, Ids]
    """Side -> ids by tau, and by log s among equals, uint32 [n]; those without a usable tau come last."""
    misfits: Ids
    """uint32 [n]: ids by log s over the whole run, highest first; empty without log s."""
    classes: list[str]
    """Names, sorted; empty without classes, or with too many to list."""
    class_of: NDArray[np.int32] | None
    """int32 [n]: places in `classes`, -1 without one."""
    texts: Texts | None
    """None without the dataset."""
    margin: Float32s | None = None
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
    reader, dataset = inspection.state, inspection.dataset
    if reader.samples >= 1 << 32:  # ids are kept as uint32
        raise RunError(f"{reader.samples:,} samples are too many to serve; use --export")
    index, count = own_directory(own_directory(folder) / INDEX), reader.samples
    dtypes: dict[str, DTypeLike] = {of: np.float32 if of in reader.fields else np.uint32 for of in reader.columns}
    dtypes |= {"kind": np.int8} | {f"{side}.coldest": np.uint32 for side in inspection.sides}
    if any(name.endswith("/log_s") for name in reader.fields):
        dtypes["misfits"] = np.uint32
    about = {"samples": count, "snapshot": reader.snapshot.id}
    of_state, make = index / f"{_STATE}-{reader.snapshot.id}", partial(_index_state, inspection, on_progress)
    found, state = _part(of_state, about, dtypes, make)
    inspection.notes[:] = dict.fromkeys([*inspection.notes, *map(str, found.get("notes", ()))])
    texts, classes, class_of = None, list[str](), None
    if dataset:
        of_texts = index / f"texts-{reader.dataset_fingerprint[:16]}"
        about = {"samples": count, "fingerprint": reader.dataset_fingerprint}
        found, arrays = _part(of_texts, about, {"class": np.int32}, partial(_index_texts, dataset, on_progress))
        texts, classes = Texts(_regular(of_texts / _TEXTS)), [str(name) for name in found["classes"]]
        class_of = arrays["class"] if classes else None
    columns = {name: state[name] for name in reader.columns}
    coldest = {side: state[f"{side}.coldest"] for side in inspection.sides}
    misfits = state.get("misfits", np.empty(0, np.uint32))
    return Catalogue(columns, state["kind"], coldest, misfits, classes, class_of, texts)


def with_margins(catalogue: Catalogue, features: FeaturesFile, folder: Path, on_progress: OnTask) -> Catalogue:
    """Return the catalogue with the margins of features of pairs, which are indexed in RUN/report/index once.

    folder: RUN/report, where `catalogue` was opened. Raises RunError if index or features are damaged,
    NotRegularFileError.
    """

    def compare(_: Path, new: Arrays) -> dict[str, Any]:
        new["margin"][:] = margins(features, partial(on_progress, "comparing pairs with negatives"))
        new["by-margin"][:] = np.argsort(new["margin"], kind="stable")
        return {}

    part = own_directory(folder / INDEX) / f"margin-{features.of.digest[:16]}"
    about = {"samples": features.samples, "digest": features.of.digest}
    _, found = _part(part, about, {"margin": np.float32, "by-margin": np.uint32}, compare)
    return replace(catalogue, margin=found["margin"], by_margin=found["by-margin"])


def _index_state(inspection: Inspection, on_progress: OnTask, _: Path, new: Arrays) -> dict[str, Any]:
    noted = len(inspection.notes)
    reader, rules = inspection.state, KindRules.of(inspection)  # which may note why there are no kinds
    count, ranks = reader.samples, np.empty(reader.samples, np.float32)
    whole_run = WholeRun(inspection, partial(on_progress, "reading all snapshots"))
    for block, rows in read_blocks(reader, reader.columns):
        here, kept = slice(block.start, block.stop), reader.is_kept(block.start, block.stop)
        for name, values in rows.items():
            new[name][here] = values
        new["kind"][here] = np.where(kept, rules.kinds(rows, block), len(KIND_NAMES))
        ranks[here] = np.where(rules.are_planted(block), np.inf, whole_run.ranks(block))
        on_progress("indexing the state", block.stop, count)
    for done, side in enumerate(inspection.sides):
        on_progress("ranking by tau", done * count, len(inspection.sides) * count)
        tau, log_s = new[f"{side}/tau"], new.get(f"{side}/log_s")
        keys = np.where((new[VISITS] > 0) & np.isfinite(tau), tau, np.float32(np.inf))
        new[f"{side}.coldest"][:] = np.argsort(keys, kind="stable") if log_s is None else np.lexsort((log_s, keys))
    if rules.log_s:
        new["misfits"][:] = np.argsort(ranks, kind="stable")
    return {"notes": inspection.notes[noted:]}


def _index_texts(dataset: Dataset, on_progress: OnTask, part: Path, new: Arrays) -> dict[str, Any]:
    """Write every sample's texts and class; without names if there are more classes than can be listed."""
    write_texts(dataset, part / _TEXTS, partial(on_progress, "indexing captions"))
    try:
        new["class"][:], names = codes_of(dataset, CLASS_COLUMN, partial(on_progress, "indexing classes"))
    except TooManyGroupsError:
        new["class"][:], names = NO_GROUP, []
    return {"classes": names}


def _part(
    folder: Path, about: dict[str, Any], dtypes: Mapping[str, DTypeLike], make: Callable[[Path, Arrays], dict[str, Any]]
) -> tuple[dict[str, Any], Arrays]:
    """Open a part of the index: its description and its arrays, [samples] each.

    If it is missing, `make` fills new arrays in a new directory, which is renamed, and returns more of the description.
    Parts of snapshots or features served before this one are removed. Raises RunError if it is damaged.
    """
    if not folder.exists():
        being_made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".being-made-"))
        try:
            new: Arrays = {
                name: np.lib.format.open_memmap(being_made / _file(name), "w+", np.dtype(dtype), (about["samples"],))
                for name, dtype in dtypes.items()
            }
            described = {"format": _FORMAT, **about, **make(being_made, new)}
            write_atomically(being_made / _ABOUT, seal_line(described))
            being_made.rename(folder)
        except BaseException:
            shutil.rmtree(being_made, ignore_errors=True)
            raise
    for other in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
        if other != folder and not other.is_symlink():
            shutil.rmtree(other)
    refuse_link(folder)
    try:
        found = unseal(read_regular(folder / _ABOUT, 64 << 20))
    except (DamagedJSONError, OSError) as error:
        raise damaged(folder, error) from error
    if found != found | about | {"format": _FORMAT}:
        raise damaged(folder, f"{_ABOUT} does not belong to this run")
    return found, {name: _mapped(folder / _file(name), dtype, about["samples"]) for name, dtype in dtypes.items()}


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


def _file(column: str) -> str:
    return f"{column.replace('/', '.')}.npy"


class Query(BaseModel, frozen=True):
    """Conditions on samples; empty texts and None leave one out."""

    words: str = ""
    """Words of the caption or the key."""
    group: str = ""
    kind: str = ""
    side: str = ""
    """Side of tau; empty: the first one."""
    low: float | None = None
    """Lowest tau, inclusive; likewise the highest."""
    high: float | None = None
    sort: Sort = "coldest"

    @classmethod
    def of(cls, given: dict[str, str]) -> Self:
        """Return the query that the texts of a form describe. Raises ConfigError for a bad value."""
        try:
            return cls.model_validate({name: text for name, text in given.items() if text.strip()})
        except ValidationError as error:
            raise ConfigError(explained(error)) from None


class Matches(NamedTuple):
    """The samples that a query finds."""

    sample_ids: Ids
    """uint32 [m], in the asked order."""
    has_more: bool
    """Whether more samples have the words than are looked at."""


def find(index: Catalogue, query: Query) -> Matches:
    """Answer a query from a catalogue.

    Raises ConfigError if the run has no such side, class, kind or order, RunError if the index is damaged.
    """
    side = query.side or next(iter(index.coldest), "")
    if side not in index.coldest and (query.side or query.low is not None or query.high is not None):
        raise ConfigError(f"the run has no temperatures of side {side!r}")
    order, (wanted, has_more) = _order(index, query, side), _wanted(index, query, side)
    if order is None:
        order = (np.arange(index.samples) if wanted is None else np.flatnonzero(wanted)).astype(np.uint32)
    elif wanted is not None:
        order = order[wanted.take(order, mode="clip") & (order < len(wanted))]  # other ids lie in a damaged index
    return Matches(order if query.sort != "hottest" else order[::-1], has_more)


def _order(index: Catalogue, query: Query, side: str) -> Ids | None:
    """Return all ids in the asked order; None if it is by id."""
    if query.sort == "misfits" and not len(index.misfits):
        raise ConfigError("the run's state has no log s, which misfits are ranked by")
    if query.sort == "margin" and index.by_margin is None:
        raise ConfigError("there are no features of pairs; for margins, start again with --neighbours 12")
    by_tau = index.coldest.get(side)
    return {"misfits": index.misfits, "margin": index.by_margin, "id": None}.get(query.sort, by_tau)


def _wanted(index: Catalogue, query: Query, side: str) -> tuple[Bools | None, bool]:
    """Return which samples meet the query, bool [n]; None if it asks for nothing but an order."""
    conditions, has_more = list[Bools](), False
    if query.words:
        if index.texts is None:
            raise ConfigError("the run's dataset cannot be read, so there are no captions to search")
        matches = index.texts.matches(query.words)
        has_more = len(matches) == MAX_MATCHES
        conditions.append(np.zeros(index.samples, np.bool_))
        conditions[0][matches] = True
    if query.group:
        if index.class_of is None or query.group not in index.classes:
            raise ConfigError(f"no such class: {query.group!r}")
        conditions.append(index.class_of == index.classes.index(query.group))
    if query.kind:
        if query.kind not in SERVED_KINDS:
            raise ConfigError(f"kind = {query.kind!r}; choose one of {', '.join(SERVED_KINDS)}")
        conditions.append(index.kinds == SERVED_KINDS.index(query.kind))
    by_tau = query.sort in ("coldest", "hottest") or query.low is not None or query.high is not None
    if by_tau and side in index.coldest:  # of usable temperatures alone
        tau = index.columns[f"{side}/tau"]
        conditions += [index.columns[VISITS] > 0, np.isfinite(tau)]
        conditions += [tau >= np.float32(query.low)] if query.low is not None else []
        conditions += [tau <= np.float32(query.high)] if query.high is not None else []
    return (reduce(np.logical_and, conditions) if conditions else None), has_more
