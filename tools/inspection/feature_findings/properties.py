"""Properties of samples with features: words, classes, pictures, copies, and near samples."""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ....pipeline.dataset.samples_table import CAPTION
from ....pipeline.opening import Dataset
from .. import Float32s, Float64s, Int64s, OnTask
from ..duplicates.same_pictures import Agreement, Thumbnails, agreement, checksums
from ..duplicates.similar_pairs import MIN_SIMILARITY
from ..features.run_features import SampleFeatures
from ..opening import Inspection
from ..temperatures.groups import CLASS_COLUMN
from ..temperatures.kinds import KindRules
from ..temperatures.survey import POOL_SAMPLES, Pool

LOOKED_AT = 20_000
"""Samples whose properties are compared: more would be compared pair by pair for minutes."""
OF_FEATURES = ("near_pictures", "near_captions", "own_cosine")
"""Properties that come from the same features as the temperatures."""
_PAIRS_AT_ONCE = 1024
_WORD = re.compile(r"\w+")
NEAR = 0.7
"""Cosine similarity from which a sample counts as near."""
NEAREST = 3
_NEAR_ROWS_AT_ONCE = 1024


class Surroundings(NamedTuple):
    """Near samples of each of m samples, among them."""

    near: Float64s
    """float64 [m]: how many of the others are near."""
    nearest: Int64s
    """int64 [m, 3]: places of the nearest others, the nearest first."""
    similarity: Float32s
    """float32 [m, 3]: their cosine similarity."""


@dataclass
class Properties:
    """Of m samples with features."""

    places: Int64s
    """int64 [m], ascending: theirs among those with features."""
    sample_ids: Int64s
    """int64 [m]."""
    values: dict[str, Float64s] = field(default_factory=dict)
    """By name, float64 [m]; NaN where a sample has none."""
    classes: Int64s | None = None
    """int64 [m]: codes, -1 without a class; None if there are no classes."""
    class_names: list[str] = field(default_factory=list)
    """By code."""
    words: list[frozenset[str]] = field(default_factory=list)
    """Of each caption; empty without captions."""
    rarest: list[str] = field(default_factory=list)
    """The word of each caption that stands in the fewest."""
    around: dict[str, Surroundings] = field(default_factory=dict)
    """`pictures` and, of pairs, `captions`: by the features of each."""
    agreement: Agreement | None = None
    """How well the nearest pictures agree, float32 [m · 3]; NaN where they are not compared."""


def properties(inspection: Inspection, features: SampleFeatures, pool: Pool, on_progress: OnTask) -> Properties:
    """Look at up to LOOKED_AT random samples with features. pool: visited samples, among which words and classes count.

    Raises DatasetError for a damaged table or picture, RunError for damaged features.
    """
    assert inspection.dataset is not None
    places = np.sort(np.random.default_rng(0).permutation(len(features))[:LOOKED_AT])
    found = Properties(places, features.sample_ids[places])
    of_rows = features.rows(places)
    for side, name in enumerate(("pictures",) if features.of.views else ("pictures", "captions")):
        found.around[name] = surroundings(np.ascontiguousarray(of_rows[:, side]))
        found.values[f"near_{name}"] = found.around[name].near
    first, second = (1, 2) if features.of.views else (0, 1)
    found.values["own_cosine"] = (of_rows[:, first] * of_rows[:, second]).sum(1).astype(np.float64)
    _look_at_texts(found, inspection.dataset, pool)
    _look_at_pictures(found, inspection.dataset, on_progress)
    rules = KindRules.of(inspection)
    if inspection.reader and rules.log_s:
        found.values["doubt"] = rules.score(inspection.reader.rows_at(found.sample_ids, rules.columns))
    return found


def _look_at_texts(found: Properties, dataset: Dataset, pool: Pool) -> None:
    """Count words, equal captions and classes among the pool's samples."""
    names = [name for name in (CAPTION, CLASS_COLUMN) if name in dataset.schema.names]
    ids = np.union1d(pool.sample_ids, found.sample_ids)
    table, places = dataset.take(ids, names), np.searchsorted(ids, found.sample_ids)
    for name in ("width", "height"):
        sizes = dataset.take(found.sample_ids, [name])[name].to_numpy().astype(np.float64)
        found.values["pixels"] = found.values.get("pixels", 1.0) * sizes
    if CLASS_COLUMN in names:
        codes, sizes, class_names = _counted(table[CLASS_COLUMN].cast(pa.string()))
        if len(class_names) > 1:
            found.classes, found.class_names = codes[places], class_names
            found.values["class_size"] = sizes[places]
    if CAPTION in names and dataset.index.mode == "pairs":
        _, same, _ = _counted(table[CAPTION])
        found.values["equal_captions"] = same[places]
        words = [frozenset(_WORD.findall((text or "").lower())) for text in table[CAPTION].to_pylist()]
        stands_in = Counter(word for of_one in words for word in of_one)
        found.words = [words[place] for place in places.tolist()]
        found.rarest = [min(of_one, key=lambda word: (stands_in[word], word), default="") for of_one in found.words]
        counts = [[float(stands_in[word]) for word in of_one] or [np.nan] for of_one in found.words]
        found.values["rarest_word"] = np.array([min(of_one) for of_one in counts], np.float64)
        found.values["word_frequency"] = np.array([np.log(of_one).mean() for of_one in counts])
        lengths = [len(_WORD.findall(text or "")) for text in table[CAPTION].take(pa.array(places)).to_pylist()]
        found.values["caption_length"] = np.array(lengths, np.float64)


def _counted(labels: pa.ChunkedArray) -> tuple[Int64s, Float64s, list[str]]:
    """Return the code of each label, -1 for null, how many samples have the same one, [n] each, and the labels."""
    encoded = labels.combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    sizes = np.bincount(codes[codes >= 0], minlength=len(encoded.dictionary) or 1).astype(np.float64)
    return codes, np.where(codes < 0, np.nan, sizes[codes]), encoded.dictionary.to_pylist()


def _look_at_pictures(found: Properties, dataset: Dataset, on_progress: OnTask) -> None:
    """Measure contrast, and compare the pictures of near samples as `--duplicates` does."""
    m, around = len(found.places), found.around["pictures"]
    with Thumbnails(dataset) as thumbnails:
        pictures = thumbnails.prepared(found.sample_ids, partial(on_progress, "pictures"))
    found.values["contrast"] = pictures.reshape(m, -1).std(1).astype(np.float64)
    one, which = np.nonzero(around.similarity >= MIN_SIMILARITY)
    other = around.nearest[one, which]
    agreed = Agreement(*np.full((2, m * NEAREST), np.nan, np.float32))
    for first in range(0, len(one), _PAIRS_AT_ONCE):
        pairs = slice(first, first + _PAIRS_AT_ONCE)
        here = agreement(pictures[one[pairs]], pictures[other[pairs]])
        for of_all, values in zip(agreed, here, strict=True):
            of_all[one[pairs] * NEAREST + which[pairs]] = values
        on_progress("near-copies", first, len(one))
    found.agreement = agreed
    copies = agreed.same.reshape(m, NEAREST).sum(1).astype(np.float64)
    if dataset.n <= POOL_SAMPLES:
        _, places, counts = np.unique(checksums(dataset), return_inverse=True, return_counts=True)
        copies = np.maximum(copies, counts[places][found.sample_ids] - 1)
    found.values["copies"] = copies


def surroundings(features: Float32s) -> Surroundings:
    """Compare m samples, float32 [m, d], rows of norm 1, at least 4, with each other."""
    m = len(features)
    found = Surroundings(np.empty(m), np.empty((m, NEAREST), np.int64), np.empty((m, NEAREST), np.float32))
    for first in range(0, m, _NEAR_ROWS_AT_ONCE):
        here = slice(first, min(first + _NEAR_ROWS_AT_ONCE, m))
        similarity = features[here] @ features.T
        rows = np.arange(len(similarity))[:, None]
        similarity[rows[:, 0], first + rows[:, 0]] = -np.inf
        found.near[here] = (similarity > NEAR).sum(1)
        some = np.argpartition(similarity, m - NEAREST, axis=1)[:, m - NEAREST :]
        order = np.argsort(-similarity[rows, some], axis=1)
        found.nearest[here] = some[rows, order]
        found.similarity[here] = similarity[rows, found.nearest[here]]
    return found
