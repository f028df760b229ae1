"""Differences between the scores of two runs on the same test samples, with standard errors."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from ...pipeline.opening import Dataset
from ...storage.arrays import Float64s, Int64s
from .bands import BANDS, estimate
from .evaluate import Evaluation, all_captions

Differences = dict[str, dict[str, dict[str, dict[str, float] | None]]]
"""By method, variant, and band or class: what `estimate` returns of B − A, the means `a` and `b`, `unpaired_error` and
`unpaired_half_width`, if A and B had samples and seeds of their own, and `queries`; None without two clusters."""


def caption_clusters(dataset: Dataset) -> Int64s:
    """Return each sample's cluster, int64 [n]: those that share a caption, directly or through others, are in one."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    captions = all_captions(dataset)
    codes = {text: code for code, text in enumerate(dict.fromkeys(text for _, text in captions), start=dataset.n)}
    ends = [sample for sample, _ in captions], [codes[text] for _, text in captions]
    links = coo_array((np.ones(len(captions), np.bool_), ends), (dataset.n + len(codes),) * 2)
    return np.asarray(connected_components(links, directed=False)[1][: dataset.n], np.int64)


def differences(pairs: Sequence[tuple[Evaluation, Evaluation]]) -> tuple[Differences, Differences]:
    """Return how far the second of each pair is above the first: over all and by band, and by class.

    pairs: of the same datasets, one for each seed; variants that not all have are left out. Clusters are retrieval's.
    """
    every, classes = [each.right for pair in pairs for each in pair], pairs[0][0].classes
    clusters, in_bands, by_class = caption_clusters(pairs[0][0].test), Differences(), Differences()
    for method, variant in [key for key in every[0] if all(key in right for right in every)]:
        of = every[0][method, variant][1]
        drawn = clusters[of] if method in ("image_to_text", "text_to_image") else of
        among = partial(_among, np.array([right[method, variant][0] for right in every], np.float64), drawn)
        banded = among(classes.test_bands[of], [*BANDS]) if classes.names else {}
        in_bands.setdefault(method, {})[variant] = among(np.zeros(len(of), np.int64), ["all"]) | banded
        by_class.setdefault(method, {})[variant] = among(classes.test[of], classes.names)
    return in_bands, by_class


def _among(values: Float64s, clusters: Int64s, groups: Int64s, names: list[str]) -> dict[str, dict[str, float] | None]:
    """values: float64 [2 pairs, x], each pair's first run, then its second. groups: int64 [x], -1 of those in none."""
    order, found = np.argsort(groups, kind="stable"), dict[str, dict[str, float] | None]()
    edges = np.searchsorted(groups[order], np.arange(len(names) + 1))
    for name, start, end in zip(names, edges, edges[1:], strict=False):
        first, second, of = values[::2, order[start:end]], values[1::2, order[start:end]], clusters[order[start:end]]
        found[name] = None
        if len(np.unique(of)) > 1:
            a, b, paired = (estimate(each, of) for each in (first, second, second - first))
            unpaired = {f"unpaired_{name}": math.hypot(a[name], b[name]) for name in ("error", "half_width")}
            found[name] = paired | unpaired | {"a": a["mean"], "b": b["mean"], "queries": len(of)}
    return found
