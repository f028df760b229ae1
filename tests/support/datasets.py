"""Facts about the datasets that conftest makes, and changes to an index."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thermopile.pipeline.dataset.index import FINGERPRINT, SHARD_SUFFIXES, read_index, seal_index, shard_name
from thermopile.pipeline.opening import Dataset
from thermopile.storage.files import sha256_of


def captions_of(number: int) -> list[str]:
    """One to five captions, none of which another number has: those of a sample in `captions_dataset`."""
    return [f"picture {number} in the words of {name}" for name in ("Ada", "Bo", "Cy", "Di", "Ed")[: 1 + number % 5]]


def named_ids(dataset: Dataset, ids, **columns) -> pa.Table:
    """A table of ids that says which dataset they are of."""
    table = pa.table({"sample_id": ids} | columns)
    return table.replace_schema_metadata({FINGERPRINT: dataset.index.fingerprint})


def change_content(path, *values):
    """Seal dataset.json with other counts of what samples repeat, or none."""
    fields = read_index(path).model_dump(exclude={"format", "fingerprint"})
    del fields["source"]["content"]
    fields["source"] |= dict(zip(["content"], values, strict=False))
    (path / "dataset.json").write_bytes(seal_index(fields))


def write_dataset(path: Path, tables: list[pa.Table]) -> Dataset:
    """Write a dataset at a path whose shards hold these samples tables, without `row`; it has no pictures.

    A column `caption` is stored as conversion stores it.
    """
    (path / "shards").mkdir(parents=True)
    digests = []
    for shard, table in enumerate(tables):
        files = {suffix: path / "shards" / shard_name(shard, suffix) for suffix in SHARD_SUFFIXES}
        files["beton"].touch()
        files["rows"].touch()
        table = table.add_column(0, "row", pa.array(range(len(table)), pa.int64()))
        if "caption" in table.column_names:
            lists = [[] if caption is None else [caption] for caption in table["caption"].to_pylist()]
            place = table.column_names.index("caption")
            table = table.set_column(place, "captions", pa.array(lists, pa.list_(pa.string())))
        pq.write_table(table, files["parquet"])
        digests.append({suffix: sha256_of(file) for suffix, file in files.items()})
    first_id = np.cumsum([0, *map(len, tables)]).tolist()
    index = {"n": first_id[-1], "mode": "images", "captions_per_sample": 0, "first_id": first_id, "image": {},
             "tokenizer": None, "tokenizer_digest": None, "shard_digests": digests, "grown_from": None,
             "source": {}}  # fmt: skip
    (path / "dataset.json").write_bytes(seal_index(index))
    return Dataset(path)
