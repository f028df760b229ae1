"""`thermopile embed`: write the features of a dataset's samples, by a run's encoders, to a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..storage.files import written_aside
from ..storage.place import AnyPlace, place_of
from .arguments import ALLOW, AT, DATASET, RUN, TARS, WEIGHTS
from .progress import progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from ..pipeline.opening import Dataset
    from ..trainer.config import Weights

NUMPY_TYPES = {"half": "f2", "float": "f4"}
ROW_GROUP = 8192
"""Most rows of a row group: no more are held."""


def embed(
    run: AnyPlace,
    dataset: AnyPlace,
    out: str | os.PathLike[str],
    *,
    at: str = "latest",
    weights: Weights | None = None,
    dtype: Literal["half", "float"] = "half",
    batch: int = 256,
    tars: AnyPlace | None = None,
    overwrite: bool = False,
    allow_code: bool = False,
) -> Path:
    """Write the features of all samples of a dataset, by a run's encoders and heads, to the Parquet file `out`.

    The columns `image` and, for pairs, `text` have vectors of model.dim numbers of 2 or 4 bytes. Arguments are those of
    `thermopile embed`. Raises RunError, DatasetError, ConfigError, OSError.

        >>> thermopile.embed("runs/mine", "data/mine", "features.parquet").exists()
        True
    """
    from ..pipeline.dataset.index import FINGERPRINT
    from ..pipeline.opening import opened
    from ..trainer.run_directory import RunDirectory, find_checkpoint, load_found
    from .inspection.rows_export import check_target

    directory, samples, out = RunDirectory(place_of(run)), opened(dataset, tars), Path(out)
    config = directory.config()  # refuse what is not a run before importing torch
    check_target(out, [".parquet"], overwrite=overwrite)
    from ..trainer.evaluation.evaluate import tokenizer_of
    from ..trainer.evaluation.features import restore_encoders, some_features
    from ..trainer.run.build import device_named, recipe_named

    checkpoint, weights = find_checkpoint(directory, at), config.model.chosen_weights(weights)
    _, training = load_found(checkpoint)
    tokenizer, sizes, _ = tokenizer_of(directory) if config.objective.mode == "bimodal" else (None, None, None)
    encoders = restore_encoders(config, checkpoint, training, sizes, weights, allow_code=allow_code)
    device = device_named("auto")
    view = (recipe_named(config.data.recipe), config.data.image_size, device)
    facts = {"run": str(directory.path), "checkpoint": checkpoint.name, "weights": weights, "dataset": samples.absolute}
    metadata = {f"thermopile.{name}": fact for name, fact in facts.items()} | {FINGERPRINT: samples.index.fingerprint}
    with closing(some_features(encoders.to(device), samples, None, *view, tokenizer=tokenizer, rows=batch)) as made:
        write_features(out, samples, made, batch, NUMPY_TYPES[dtype], metadata)
    return out


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile embed runs/cc3m data/cc3m features.parquet\n"
    "  thermopile embed runs/cc3m data/flickr flickr.parquet --at step-4000 --dtype float"
)
@RUN
@click.argument("dataset", type=DATASET, metavar="DATA")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.parquet")
@AT
@WEIGHTS
@click.option("--dtype", type=click.Choice([*NUMPY_TYPES]), default="half", show_default=True, help="2 or 4 bytes.")
@click.option("--batch", type=click.IntRange(1, ROW_GROUP), default=256, show_default=True, help="Samples at once.")
@TARS
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@ALLOW
def command(**options: Any) -> None:
    """Write the features of all samples of DATA, by the encoders and heads of RUN's latest checkpoint, to a file.

    Those of the pictures and, for pairs, of the first captions. Works while the run trains and changes nothing in it.
    """
    click.echo(embed(**options))


def write_features(
    out: Path, dataset: Dataset, made: Iterator[list[Tensor]], batch: int, dtype: str, metadata: Mapping[str, str]
) -> None:
    """Write the features of all samples, from some_features in batches of `batch`, with progress on stderr.

    The file takes its name once it is complete and synced; on failure nothing is left behind. Raises OSError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    done, pending = 0, list[pa.Table]()
    with written_aside(out) as file, ExitStack() as opened, progress_bar("samples", dataset.n) as bar:
        for table, features in zip(dataset.tables(["key"], batch), made, strict=True):
            columns = {"sample_id": pa.array(range(done, done + len(table)), pa.int64()), "key": table["key"]}
            for side, rows in zip(("image", "text"), features, strict=False):
                values = rows.cpu().numpy().astype(dtype)
                columns[side] = pa.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1])
            pending.append(pa.table(columns, metadata=metadata))
            if not done:  # values do not repeat, so that a dictionary would only take time
                writer = opened.enter_context(pq.ParquetWriter(file, pending[0].schema, use_dictionary=False))
            bar.update(done := done + len(table))
            if done == dataset.n or sum(map(len, pending)) + batch > ROW_GROUP:
                writer.write_table(pa.concat_tables(pending))
                pending = []
