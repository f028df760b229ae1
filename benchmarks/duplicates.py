"""Finding duplicates and neighbours: what `thermopile inspect` finds among glyphs, and how long a question takes.

\b
glyphs  near-duplicates of 2 % of the glyphs: the same picture scaled by 2 to 5 %, encoded again, with another caption
query   the neighbours and hardest negatives of single samples among 10⁶ pairs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.tools.inspection.duplicates.same_pictures import MIN_CORRELATION, Agreement, Thumbnails
from thermopile.tools.inspection.duplicates.similar_pairs import SimilarPairs, similar_pairs
from thermopile.tools.inspection.features.features_file import NAME, FeaturesFile, FeaturesOf, write_features
from thermopile.tools.inspection.features.neighbours import find_neighbours

from .glyph_runs import thermopile, trained
from .harness import Figure, Measured, Part, script, timed


@dataclass(frozen=True)
class Glyphs:
    """Glyphs with near-duplicates, and the demo's preset trained on them."""

    seed: int = 2
    """The thresholds were chosen on seed 1."""
    share: float = 0.02
    epochs: int = 20


def find(sizes: Glyphs, directory: Path) -> Measured:
    """Train, let `inspect --duplicates` write its pairs, and compare them with what was made."""
    data, run = directory / "data", directory / "run"
    convert(GlyphSource(sizes.seed, duplicate=sizes.share), data, ConvertSettings(), workers=2)
    trained(data, run, {"seed": sizes.seed, "epochs": sizes.epochs, "checkpoint.every_steps": 0})
    thermopile("inspect", run, "--duplicates")
    table = pq.read_table(run / "report" / "duplicates.parquet")
    dataset = Dataset(data)
    truth = made_pairs(dataset)
    found = set(zip(table["first_id"].to_pylist(), table["second_id"].to_pylist(), strict=True))
    candidates, agreed = compared(dataset, FeaturesFile(run / "report" / NAME), directory)
    is_copy = np.array([pair in truth for pair in zip(*map(np.ndarray.tolist, candidates[:2]), strict=True)])
    alike = agreed.correlation >= MIN_CORRELATION
    figures = [
        Figure("missed_percent", "missed", "%", 100 * (1 - len(found & truth) / len(truth)), at_most=10),
        Figure("false_percent", "false", "%", 100 * len(found - truth) / max(1, len(found)),
               100 * float((alike & ~is_copy).sum() / alike.sum()), at_most=1),
        Figure("not_similar_percent", "missed by their features", "%", 100 * (1 - is_copy.sum() / len(truth))),
        Figure("largest_of_copies", "difference of 99 % of the copies, at most", "grey levels",
               float(np.quantile(agreed.difference[is_copy], 0.99))),
        Figure("smallest_of_others", "difference of 99.9 % of the others, at least", "grey levels",
               float(np.quantile(agreed.difference[~is_copy], 0.001))),
    ]  # fmt: skip
    return Measured(
        f"{dataset.n:,} glyphs of seed {sizes.seed}, {len(truth):,} of them near-duplicates, {sizes.epochs} epochs; "
        f"{len(candidates.first):,} pairs compared by pixels",
        "a threshold of the correlation alone",
        figures,
    )


def made_pairs(dataset: Dataset) -> set[tuple[int, int]]:
    """Return the pairs of a glyph and its near-duplicate, lower id first."""
    rows = dataset.take(np.arange(dataset.n), ["key", "altered"]).to_pydict()
    id_of = {key: sample_id for sample_id, key in enumerate(rows["key"])}
    copies = [(id, told.removeprefix("duplicate of ")) for id, told in enumerate(rows["altered"]) if told]
    return {(min(id, id_of[key]), max(id, id_of[key])) for id, key in copies}


def compared(dataset: Dataset, features: FeaturesFile, scratch: Path) -> tuple[SimilarPairs, Agreement]:
    """Return all candidates and how their pixels agree."""
    parts = [pairs for _, pairs in similar_pairs(features, np.zeros(dataset.n, np.bool_), scratch)]
    pairs = SimilarPairs.joined(parts)
    with Thumbnails(dataset) as thumbnails:
        return pairs, thumbnails.compared(pairs)


@dataclass(frozen=True)
class Queries:
    """Random features of pairs."""

    samples: int = 10**6
    dim: int = 64
    queries: int = 9


def query(sizes: Queries, directory: Path) -> Measured:
    """Ask for the neighbours of single samples."""
    of = FeaturesOf(samples=sizes.samples, checkpoint="step-1", weights="raw", digest="0" * 64)
    write_features(directory / NAME, of, random_features(sizes))
    features = FeaturesFile(directory / NAME, of)
    tau = {"image": 0.05, "text": 0.1}
    find_neighbours(features, 0, 20, tau)  # compiles, and reads the file into the page cache
    ids = np.linspace(0, sizes.samples - 1, sizes.queries, dtype=np.int64).tolist()
    seconds = [timed(find_neighbours, features, sample_id, 20, tau) for sample_id in ids]
    return Measured(
        f"20 neighbours and negatives of both sides among {sizes.samples:,} pairs of {sizes.dim} numbers; median of "
        f"{sizes.queries}",
        "",
        [Figure("milliseconds", "a sample", "ms", 1000 * median(seconds), at_most=300)],
    )


def random_features(sizes: Queries) -> Iterator[NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    for first in range(0, sizes.samples, 1 << 16):
        rows = rng.standard_normal((min(1 << 16, sizes.samples - first), 2, sizes.dim), dtype=np.float32)
        yield rows / np.linalg.norm(rows, axis=2, keepdims=True)


PARTS = {
    "glyphs": Part(find, Glyphs(), Glyphs(epochs=1)),
    "query": Part(query, Queries(), Queries(samples=10_000, queries=2)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch", "numpy")()
