"""Queries of the served page: conditions on samples and their order."""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ...state_store.schema import VISITS
from ...trainer.errors import ConfigError
from .catalogue import SERVED_KINDS, Catalogue, Ids
from .texts import MAX_MATCHES

Sort = Literal["coldest", "hottest", "misfits", "margin", "id"]


class Query(NamedTuple):
    """Conditions on samples; empty texts and None leave one out."""

    words: str = ""
    """Words of the caption or the key."""
    group: str = ""
    """Class."""
    kind: str = ""
    side: str = ""
    """Side of tau; empty: the first one."""
    low: float | None = None
    """Lowest tau, inclusive; likewise the highest."""
    high: float | None = None
    sort: Sort = "coldest"

    @classmethod
    def of(cls, given: dict[str, str]) -> Query:
        """Return the query that the texts of a form describe. Raises ConfigError for a bad value."""
        values: dict[str, Any] = {name: given[name] for name in ("words", "group", "kind", "side") if given.get(name)}
        for name in ("low", "high"):
            try:
                if text := given.get(name, "").strip():
                    values[name] = float(text)
            except ValueError:
                raise ConfigError(f"{name} = {text!r} is not a number") from None
        sort = given.get("sort") or "coldest"
        if sort not in get_args(Sort):
            raise ConfigError(f"sort = {sort!r}; choose one of {', '.join(get_args(Sort))}")
        if values.get("kind") and values["kind"] not in SERVED_KINDS:
            raise ConfigError(f"kind = {values['kind']!r}; choose one of {', '.join(SERVED_KINDS)}")
        return cls(**values, sort=cast(Sort, sort))


class Matches(NamedTuple):
    """The samples that a query finds."""

    sample_ids: Ids
    """uint32 [m], in the asked order."""
    has_more: bool
    """Whether more samples have the words than are looked at."""


class Finder:
    """Answers queries from a catalogue; the last few answers are kept for their next pages."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.find = lru_cache(maxsize=4)(self._find)  # up to 8 bytes a sample each

    def _find(self, query: Query) -> Matches:
        """Raises ConfigError if the run has no such side, class or order, RunError if the index is damaged."""
        side = query.side or next(iter(self._catalogue.coldest), "")
        if side not in self._catalogue.coldest and (query.side or query.low is not None or query.high is not None):
            raise ConfigError(f"the run has no temperatures of side {side!r}")
        order, (wanted, has_more) = self._order(query, side), self._wanted(query, side)
        if order is None:
            order = (np.arange(self._catalogue.samples) if wanted is None else np.flatnonzero(wanted)).astype(np.uint32)
        elif wanted is not None:
            order = order[wanted.take(order, mode="clip") & (order < len(wanted))]  # other ids lie in a damaged index
        return Matches(order if query.sort != "hottest" else order[::-1], has_more)

    def _order(self, query: Query, side: str) -> Ids | None:
        """Return all ids in the asked order; None if it is by id."""
        index = self._catalogue
        if query.sort == "misfits" and not len(index.misfits):
            raise ConfigError("the run's state has no log s, which misfits are ranked by")
        if query.sort == "margin" and index.by_margin is None:
            raise ConfigError("there are no features of pairs; for margins, start again with --neighbours 12")
        by_tau = index.coldest.get(side)
        return {"misfits": index.misfits, "margin": index.by_margin, "id": None}.get(query.sort, by_tau)

    def _wanted(self, query: Query, side: str) -> tuple[NDArray[np.bool_] | None, bool]:
        """Return which samples meet the query, bool [n]; None if it asks for nothing but an order."""
        index, conditions, has_more = self._catalogue, [], False
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
            conditions.append(index.kinds == SERVED_KINDS.index(query.kind))
        by_tau = query.sort in ("coldest", "hottest") or query.low is not None or query.high is not None
        if by_tau and side in index.coldest:  # of usable temperatures alone
            tau = index.columns[f"{side}/tau"]
            conditions += [index.columns[VISITS] > 0, np.isfinite(tau)]
            conditions += [tau >= np.float32(query.low)] if query.low is not None else []
            conditions += [tau <= np.float32(query.high)] if query.high is not None else []
        return (reduce(np.logical_and, conditions) if conditions else None), has_more
