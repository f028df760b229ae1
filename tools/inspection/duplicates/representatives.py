"""Representatives of clusters: a cluster's members agree with its representative, so that chains do not join."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ....state_store.schema import VISITS
from .. import OnDone
from ..features.features_file import FeaturesFile
from ..opening import Inspection, read_blocks
from ..temperatures.kinds import KindRules
from .similar_pairs import SimilarPairs, most_similar

_REPRESENTATIVES = 1024
"""Compared with each sample of a crowd, so that time does not grow with the square of its samples."""
Star = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Samples that another one represents, and that one, int64 [k] each."""


def read_scores(inspection: Inspection) -> tuple[Inspection, NDArray[np.float32]]:
    """Return also how badly each sample fits, float32 [n]: the sum of log s over the sides; inf with too few visits.

    0 without log s; none, float32 [0], without a snapshot. Raises DamagedChunkError, SnapshotNotFoundError.
    """
    scores = [np.empty(0, np.float32)]
    if inspection.reader is not None:
        rules = KindRules.of(inspection)
        for block, all_rows in read_blocks(inspection.reader, [VISITS, *(f"{side}/log_s" for side in rules.log_s)]):
            rows = rules.judged(all_rows, block)
            scores.append(np.where(rows[VISITS] < rules.least_visits, np.inf, rules.score(rows)).astype(np.float32))
    return inspection, np.concatenate(scores)


def star(ids: NDArray[np.int64], group: NDArray[np.int64], score: NDArray[np.float32]) -> Star:
    """Return the members of each group but its representative: the lowest score, float32 [n], of equals the lowest id.

    ids, group: int64 [m].
    """
    order = np.lexsort((ids, score[ids], group))
    ids, is_first = ids[order], np.diff(group[order], prepend=-1) != 0
    return ids[~is_first], ids[is_first][np.cumsum(is_first) - 1][~is_first]


def represent(
    near: SimilarPairs,
    score: NDArray[np.float32],
    features: FeaturesFile,
    confirm: Callable[[SimilarPairs], SimilarPairs],
    on_progress: OnDone = lambda done, total: None,
) -> NDArray[np.int64]:
    """Return the representative of every sample, int64 [n]: itself, or one that a confirmed pair links it with.

    Samples in `near`, the confirmed pairs, are walked by ascending score, float32 [n], then id: each joins the first
    representative that it is linked with, or becomes one. In a crowd, a sample has candidates among a few others only:
    without such a link it is first compared with the most similar ones among the representatives of the samples that
    it is linked with, and the first _REPRESENTATIVES of all that pairs connect it with.
    confirm: candidates -> the confirmed ones. on_progress: called with the samples walked, and how many there are.
    """
    from scipy.sparse import coo_array  # late, as few inspections need it
    from scipy.sparse.csgraph import connected_components

    representative = np.arange(features.samples)
    ids, places = np.unique(np.concatenate(near[:2]), return_inverse=True)
    if not len(ids):
        return representative
    ends = np.split(places, 2)
    graph = coo_array((np.ones(len(ends[0]), np.int8), (ends[0], ends[1])), shape=(len(ids), len(ids))).tocsr()
    graph = graph + graph.T
    _, crowd = connected_components(graph, directed=False)
    walked_at: dict[int, int] = {}
    """Representative -> when it was walked."""
    firsts: defaultdict[int, list[int]] = defaultdict(list)
    """Crowd -> its first representatives."""
    for done, place in enumerate(np.lexsort((ids, score[ids])).tolist()):
        sample_id, others = int(ids[place]), firsts[crowd[place]]
        linked = ids[graph.indices[graph.indptr[place] : graph.indptr[place + 1]]]
        if others and walked_at.keys().isdisjoint(linked.tolist()):
            theirs = [one for one in representative[linked].tolist() if one in walked_at]
            candidates = np.array(list(dict.fromkeys([*others, *theirs])))
            linked = np.concatenate(confirm(most_similar(features, sample_id, candidates))[:2])
        found = min(walked_at.keys() & linked.tolist(), key=walked_at.__getitem__, default=sample_id)
        representative[sample_id] = found
        if found == sample_id:
            walked_at[sample_id] = done
            if len(others) < _REPRESENTATIVES:
                others.append(sample_id)
        on_progress(done + 1, len(ids))
    return representative
