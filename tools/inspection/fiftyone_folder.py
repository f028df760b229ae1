"""FiftyOne both ways: rows and pictures as a dataset that it imports, and the tags that people set in it."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...pipeline.dataset.index import FINGERPRINT_COLUMN
from ...pipeline.opening import Dataset
from ...storage.files import read_regular
from ...storage.local import LocalPath
from ...storage.sealed_json import DamagedJSONError, parse
from ...trainer.errors import ConfigError, one_line

SUFFIX, KEEP, DROP = ".fiftyone", "keep", "drop"
UNTYPED = (None, math.inf, -math.inf)


def write_folder(to: Path, tables: Iterable[pa.Table], dataset: Dataset) -> None:
    """Write rows and their stored JPEGs to a new folder, for `fiftyone.types.FiftyOneDataset`.

    Without metadata.json, FiftyOne takes a field's type from its values; for that, null, nan and inf are left out.
    """
    with LocalPath(to).built() as folder:
        (folder / "data").mkdir(parents=True)
        with open(folder / "samples.json", "x", encoding="utf-8") as file:
            for number, row in enumerate(row for table in tables for row in table.to_pylist()):
                path = f"data/{row['sample_id']}.jpg"
                (folder / path).write_bytes(dataset.jpeg(row["sample_id"]))
                usable = {
                    name.replace("/", "_"): value
                    for name, value in row.items()
                    if value == value and value not in UNTYPED
                }
                line = json.dumps(usable | {"filepath": path, "tags": []})
                file.write(f",\n{line}" if number else f'{{"samples": [\n{line}')
            file.write("\n]}\n")


def tagged_ids(file: Path, dataset: Dataset) -> dict[str, NDArray[np.int64]]:
    """Return the ids tagged KEEP and DROP in the samples.json of a FiftyOneDataset that FiftyOne exported.

    Raises ConfigError if it is another file, or has another dataset's samples.
    """
    found, known = {KEEP: list[int](), DROP: list[int]()}, {dataset.index.fingerprint, *dataset.index.predecessors}
    try:
        for sample in parse(read_regular(file, 1 << 30))["samples"]:
            sample_id, tags = sample["sample_id"], {*sample["tags"]}
            if sample[FINGERPRINT_COLUMN] not in known or sample_id not in range(dataset.n):
                raise ConfigError(f"--tags {file} has sample {sample_id!r:.40} of another dataset than {dataset.place}")
            for tag in found.keys() & tags:
                found[tag].append(sample_id)
    except (OSError, DamagedJSONError) as error:
        raise ConfigError(f"--tags {file} cannot be read: {one_line(error)}") from error
    except (LookupError, TypeError) as error:
        raise ConfigError(f"--tags {file} is not the samples.json of a FiftyOneDataset; export one") from error
    return {tag: np.array(ids, np.int64) for tag, ids in found.items()}
