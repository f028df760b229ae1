"""duplicates.html: examples of the duplicates found, with their pictures."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ...pipeline.opening import Dataset
from ...storage.files import write_atomically
from ..inspection.duplicates.finding import NEAR, THRESHOLDS, Duplicates
from ..inspection.opening import Inspection
from ..inspection.temperatures.samples import read_samples
from .html import document, part
from .sheets import Cards, data_uris, read_pictures

DUPLICATES_PAGE = "duplicates.html"
EXAMPLES = 24
"""Clusters shown of each kind."""
MEMBERS = 8
"""Samples shown of a cluster."""
MAX_PICTURE_BYTES = 7_000_000


def _clusters(found: Duplicates) -> str:
    return f"{len(found.sizes):,} cluster{'s' * (len(found.sizes) != 1)}"


def duplicate_facts(found: Duplicates) -> list[tuple[str, str]]:
    """Return what was found, and by which thresholds, as (label, text) pairs."""
    pairs, sizes = found.counts, found.sizes
    copies = sum(sizes.values()) - len(sizes)
    return [
        ("duplicates", f"{_clusters(found)}; {copies:,} of {found.samples:,} samples could be left out"),
        ("exact", f"samples with the JPEG of an earlier one: {pairs['exact']:,}"),
        ("near", f"{pairs['near']:,} pairs, of {found.compared:,} similar ones compared by pixels"),
        ("blank", f"{pairs['blank'] + 1:,} pictures of one colour" if pairs["blank"] else "at most one picture"),
        (
            "thresholds",
            "near: similarity of the features ≥ {similarity:g}; once aligned, correlation ≥ {correlation:g} "
            "and difference ≤ {difference:g} grey levels".format(**THRESHOLDS),
        ),
    ]


def write_duplicates_page(inspection: Inspection, dataset: Dataset, found: Duplicates, folder: Path) -> Path:
    """Write the page into `folder` atomically and return its path. Pictures that cannot be shown are noted."""
    near = np.flatnonzero((found.reason == NEAR) & (found.cluster >= 0))
    order = near[np.argsort(found.agreement.correlation[near], kind="stable")]
    least_certain = list(dict.fromkeys(found.cluster[order[: 4 * EXAMPLES]].tolist()))[:EXAMPLES]
    groups = {"The largest clusters": list(found.sizes)[:EXAMPLES], "The least certain": least_certain}
    members = found.members([cluster for clusters in groups.values() for cluster in clusters])
    shown = [id for clusters in groups.values() for cluster in clusters for id in members[cluster][:MEMBERS]]
    pictures = read_pictures(dataset, shown, inspection.notes)
    # Without the state: a run that trains may have deleted the snapshot meanwhile.
    cards = Cards(
        read_samples(replace(inspection, reader=None), shown), data_uris(pictures, shown, MAX_PICTURE_BYTES), 100
    )
    agreement = dict[int, str]()  # of each sample in a cluster with its representative
    for place in np.flatnonzero((found.pairs.first == found.cluster) | (found.pairs.second == found.cluster)).tolist():
        cluster = int(found.cluster[place])
        other = int(found.pairs.first[place] + found.pairs.second[place]) - cluster
        correlation, difference = found.agreement.correlation[place], found.agreement.difference[place]
        agreement[other] = ("exact copy", f"correlation {correlation:.4f}, difference {difference:.2f}", "blank")[
            found.reason[place]
        ]
    parts = {
        title: part("sections.html", "clusters", clusters, members, MEMBERS, cards, agreement)
        for title, clusters in groups.items()
        if clusters
    }
    parts["Figures"] = part("elements.html", "facts", duplicate_facts(found))
    name = inspection.run.path.resolve().name
    lede = f"{_clusters(found)} of samples with the same picture."
    html = document("Duplicates among the samples of", name, lede, "", inspection.notes, parts)
    write_atomically(folder / DUPLICATES_PAGE, html.encode())
    return folder / DUPLICATES_PAGE
