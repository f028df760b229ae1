"""How many wrong captions `thermopile score` finds with a model that was trained on other samples.

SAMPLES pairs of DATA, the last of them, get a dataset of their own in which a share of the captions is exchanged at
random, and RUN's model scores it. For the first k pairs in the order of log s and of the cosine alone: the share of
wrong captions, and the share expected by random pairs. Neither RUN nor anything else may have been trained on them.

\b
Example, with data and a model as benchmarks.icons and benchmarks.kinds describe:
  thermopile train --preset small --data icons --select first-60000.parquet --set data.image_size=32 --set epochs=3 \\
    --out model
  python -m benchmarks.scored scored --data icons --model model
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thermopile.pipeline.dataset.samples_table import CAPTION
from thermopile.pipeline.opening import Dataset
from thermopile.state_store.reader import StateReader
from thermopile.storage.local import LocalPath
from thermopile.tools.inspection.temperatures.misfits import wrong_captions
from thermopile.trainer.config import RANDOM

from .glyph_runs import thermopile
from .markdown import table

FIRST = (36, 100, 200, 500, 1000, 2000)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--samples", default=20_000, show_default=True)
@click.option("--wrong", "share", default=0.05, show_default=True)
def main(folder: Path, data: Path, model: Path, samples: int, share: float) -> None:
    folder.mkdir(exist_ok=True)
    dataset, rng = Dataset(LocalPath(data)), np.random.default_rng(0)
    ids = np.arange(dataset.n - samples, dataset.n)
    chosen, captions = rng.permutation(samples)[: round(share * samples)], ids.copy()
    captions[chosen] = ids[np.roll(chosen, 1)]
    texts = np.array(dataset.column(CAPTION).to_pylist(), object)
    pairs, run = folder / f"pairs-{samples}-{share:g}", folder / f"run-{samples}-{share:g}"
    if not pairs.exists():
        told = np.where(texts[captions] != texts[ids], "wrong", "right")
        jpegs = [dataset.jpeg(number) for number in ids.tolist()]
        pq.write_table(
            pa.table({"image": jpegs, "caption": texts[captions].tolist(), "told": told}), f"{pairs}.parquet"
        )
        how = ("--group", "told", "--tokenizer", dataset.tokenizer_path, "--workers", 1)
        thermopile("convert", "parquet", f"{pairs}.parquet", pairs, *how)
    if not run.exists():
        thermopile("score", pairs, "--model", model, "--out", run)
        thermopile("embed", run, pairs, folder / f"{run.name}.parquet")
    is_wrong = np.array(Dataset(LocalPath(pairs)).column("group").to_pylist()) == "wrong"
    reader, features = StateReader.open(LocalPath(run) / "state"), pq.read_table(folder / f"{run.name}.parquet")
    pictures, texts_of = (np.stack(features[side].to_numpy()).astype(np.float32) for side in ("image", "text"))
    scores = {
        "log s": (reader.column("image/log_s") + reader.column("text/log_s"), reader.column(RANDOM)),
        "cosine": (-(pictures * texts_of).sum(1), -(pictures * np.roll(texts_of, 1, 0)).sum(1)),
    }
    rows = []
    for name, (score, of_random) in scores.items():
        order = np.argsort(-score)
        found = wrong_captions(np.searchsorted(-score[order], -of_random, "right"), samples)
        assert found is not None
        true = np.cumsum(is_wrong[order]) / np.arange(1, samples + 1)
        rows.append((f"{name}: wrong", *(f"{true[k - 1]:.2f}" for k in FIRST), f"{is_wrong.mean():.1%}"))
        bounds = "{:.1%} ({:.1%} to {:.1%})".format(*found.share)
        rows.append((f"{name}: expected", *(f"{found.precision[k - 1]:.2f}" for k in FIRST), bounds))
    click.echo(table((f"first of {samples:,}", *map(str, FIRST), "of all"), rows))


if __name__ == "__main__":
    main()
