"""JSON and parquet answers of the server: samples, their pictures and views, and selections."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from io import BytesIO
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...pipeline.dataset.index import FINGERPRINT
from ...pipeline.errors import DatasetError
from ...pipeline.opening import Dataset
from ...pipeline.views.recipes import RECIPES
from ...state_store.reader import StateReader
from ...storage.sealed_json import finite
from ...trainer.errors import ConfigError
from ..inspection import silent
from ..inspection.features.confirmation import MAX_NEGATIVES
from ..inspection.features.features_file import FeaturesFile
from ..inspection.features.neighbours import ANCHORS, find_neighbours
from ..inspection.opening import Inspection, check_ids
from ..inspection.rows_export import of_dataset
from ..inspection.temperatures.samples import InspectedSample, StateRow
from ..inspection.temperatures.through_time import read_every_snapshot
from ..printing import plain_text
from ..report.sheets import Listing, figures, listings
from .catalogue import SERVED_KINDS, Catalogue, Query, find

PAGE_SAMPLES, NEIGHBOURS = 60, 12
"""Samples on a page, and in a list of neighbours."""
_LONGEST, _LONGEST_ON_CARD = 4000, 300
"""Characters of a caption beside a sample, and on a card."""

Json = dict[str, Any]


class Answers:
    """Answers for one snapshot of a run. Thread-safe."""

    def __init__(self, inspection: Inspection, index: Catalogue, features: FeaturesFile | None, count: int) -> None:
        """features: of all samples; without them there are no neighbours. count: length of each list of them."""
        self._inspection, self._catalogue = inspection, index
        self._find = lru_cache(maxsize=4)(partial(find, index))  # for next pages; up to 8 bytes a sample each
        self._features, self._count, self._comparing = features, count, Lock()
        counts = np.bincount(index.kinds, minlength=len(SERVED_KINDS)).tolist()
        self._kinds = {name: count for name, count in zip(SERVED_KINDS, counts, strict=True) if count}
        if inspection.dataset:
            with suppress(DatasetError, OSError):  # which the reader is told who asks for such a sample
                # Loads the compiled code, for which the first reader would wait.
                self.sample(0)
                self.picture(0)

    def about(self) -> Json:
        """Describe the run and list the choices that the page offers."""
        index, reader = self._catalogue, self._inspection.state
        return {
            "run": plain_text(self._inspection.run.path.resolve().name),
            "snapshot": reader.snapshot.tag,
            "samples": index.samples,
            "page": PAGE_SAMPLES,
            "sides": list(index.coldest),
            "kinds": self._kinds,
            "classes": index.classes,
            "ranked": len(index.misfits) > 0,
            "pairs": self._inspection.config.objective.mode == "bimodal",
            "negatives": 0 if index.margin is None else min(MAX_NEGATIVES, index.samples),
            "pictures": self._inspection.dataset is not None,
            "neighbours": self._features is not None,
            "notes": [plain_text(note, 1000) for note in self._inspection.notes],
        }

    def samples(self, query: Query, start: int) -> Json:
        """Return a page of the samples that a query finds. Raises as `find`."""
        found = self._find(query)
        ids = [int(id) for id in found.sample_ids[start : start + PAGE_SAMPLES]]
        return {"total": len(found.sample_ids), "has_more": found.has_more, "samples": self.cards(ids)}

    def cards(self, sample_ids: Sequence[int]) -> list[Json]:
        """Return what the card of each sample shows."""
        index = self._catalogue
        texts = index.texts.of(sample_ids) if index.texts else [None] * len(sample_ids)
        scored = [name.removesuffix("/log_s") for name in index.columns if name.endswith("/log_s")]
        return [
            {
                "id": id,
                "kind": SERVED_KINDS[index.kinds[id]],
                "tau": {side: finite(index.columns[f"{side}/tau"][id].item()) for side in index.coldest},
                "log_s": {side: finite(index.columns[f"{side}/log_s"][id].item()) for side in scored},
                "margin": None if index.margin is None else finite(index.margin[id].item()),
                "caption": plain_text(text.caption, _LONGEST_ON_CARD) if text else "",
                "class": plain_text(text.group) if text else "",
            }
            for id, text in zip(sample_ids, texts, strict=True)
        ]

    def sample(self, sample_id: int) -> Json:
        """Return everything about one sample. Raises ConfigError for an unknown id, DatasetError."""
        index, dataset, state = self._catalogue, self._inspection.dataset, self._state(sample_id)
        (card,) = self.cards([sample_id])
        text = index.texts.of([sample_id])[0] if index.texts else None
        return card | {
            "captions": [plain_text(line, _LONGEST) for line in text.caption.splitlines()] if text else [],
            "table": {name: plain_text(getattr(text, name), 1000) for name in ("key", "uri")} if text else {},
            "state": {name: finite(value) for name, value in state.items()},  # log s is -inf before the first visit
            "history": self._history(sample_id),
            "views": self._recipe() in RECIPES and dataset is not None,
        }

    def neighbours(self, sample_id: int) -> Json:
        """Return the lists of a sample's neighbours and hardest negatives.

        Raises ConfigError for an unknown id, or without features; RunError if they are damaged; DatasetError.
        """
        if (features := self._features) is None:
            raise ConfigError("there are no features of the samples; start again with --neighbours")
        state = self._state(sample_id)
        tau = {side: state.get(f"{side}/tau") for side in self._catalogue.coldest or ANCHORS[features.sides]}
        with self._comparing:  # one comparison takes all cores
            found = find_neighbours(features, sample_id, self._count, tau)
        return {"lists": [self._listed(listing) for listing in listings(InspectedSample(sample_id, state, {}), found)]}

    def _listed(self, listing: Listing) -> Json:
        cards = self.cards(listing.ranking.sample_ids.tolist())
        samples = [card | {"figures": words} for card, words in zip(cards, figures(listing.ranking), strict=True)]
        return {"title": listing.title, "words": listing.words, "samples": samples}

    def _state(self, sample_id: int) -> StateRow:
        """Return a row of the state. Raises ConfigError for an unknown id."""
        index = self._catalogue
        check_ids([sample_id], index.samples)
        return {name: values[sample_id].item() for name, values in index.columns.items()}

    def _history(self, sample_id: int) -> list[Json]:
        """Return tau at every snapshot that the run still has, oldest first."""
        sides = list(self._catalogue.coldest)

        def read(reader: StateReader) -> Json:
            rows = reader.rows_at(np.array([sample_id]), [f"{side}/tau" for side in sides])
            tau = {side: finite(rows[f"{side}/tau"].item()) for side in sides}
            return {"tag": reader.snapshot.tag, "step": reader.snapshot.step, "tau": tau}

        # Not by read_histories, which needs the snapshot that is served: a run that trains deletes it after a while.
        # With notes of its own: a snapshot that is missing would be noted at every question.
        return read_every_snapshot(replace(self._inspection, notes=[]), read, silent)

    def picture(self, sample_id: int) -> bytes:
        """Return the stored JPEG. Raises DatasetError, ConfigError without the dataset."""
        return self._dataset().jpeg(sample_id)

    def views(self, sample_id: int, epoch: int) -> bytes:
        """Return two augmented views side by side as a PNG, as the run makes them. Raises as picture."""
        from PIL import Image

        from ..sample_sheet import shown_samples  # imports torch

        dataset, config = self._dataset(), self._inspection.config
        check_ids([sample_id], dataset.n)
        of = dataset, np.array([sample_id]), self._recipe()
        (shown,) = shown_samples(*of, seed=config.seed, epoch=epoch, image_size=config.data.image_size)
        file = BytesIO()
        Image.fromarray(np.hstack([np.asarray(view.picture) for view in shown.views])).save(file, "PNG")
        return file.getvalue()

    def selection(self, sample_ids: Any, tags: Any) -> bytes:
        """Return samples and their tags as a parquet file, by ascending id, which `train --select` reads.

        Raises ValueError or TypeError unless these are lists of distinct ids of samples and as many texts.
        """
        samples = self._catalogue.samples
        if wrong := [id for id in sample_ids if type(id) is not int or not 0 <= id < samples]:
            raise ValueError(f"{wrong[0]!r} is no id; ids are integers, 0 … {samples - 1}")
        if len(tagged := dict(sorted(zip(sample_ids, tags, strict=True)))) < len(sample_ids):
            raise ValueError("an id is there twice")
        ids, texts = pa.array(tagged.keys(), pa.int64()), pa.array(tagged.values(), pa.string())
        return self._parquet(pa.table({"sample_id": ids, "tag": texts}))

    def all_found(self, query: Query) -> bytes:
        """Return all samples that a query finds as a parquet file, by ascending id. Raises as `find`."""
        return self._parquet(pa.table({"sample_id": np.sort(self._find(query).sample_ids).astype(np.int64)}))

    def _parquet(self, table: pa.Table) -> bytes:
        """Return a table of ids as a file that names their dataset, so that no other one takes it."""
        file = BytesIO()
        pq.write_table(of_dataset(table, {FINGERPRINT: self._inspection.state.dataset_fingerprint}), file)
        return file.getvalue()

    def _dataset(self) -> Dataset:
        if self._inspection.dataset is None:
            raise ConfigError("the run's dataset cannot be read, so there are no pictures")
        return self._inspection.dataset

    def _recipe(self) -> str:
        recipe = self._inspection.config.data.recipe
        return recipe if isinstance(recipe, str) else ""
