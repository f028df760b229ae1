"""A run's scores by `thermopile eval`, and by its export in transformers, which reads the original picture files.

The weights are the same and so are the features of the same pixels. What differs is how a picture becomes pixels:
`eval` reads the dataset's JPEGs, and like training decodes them at a half, a quarter or an eighth where that suffices;
a processor reads the file in full and resizes it.

ROOT is the folder that was converted, or that of the csv. The run's encoders must be hf:….

\b
Example:
  python -m benchmarks.exported runs/drawings data/drawings ~/drawings
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, normalize

from thermopile.pipeline.opening import Dataset
from thermopile.trainer.evaluation.scoring import Vote, knn, retrieval_ranks

from .glyph_runs import thermopile
from .markdown import table

AT_ONCE, VOTE = 100, Vote(10)


@click.command(help=__doc__)
@click.argument("run")
@click.argument("data")
@click.argument("root", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(run: str, data: str, root: Path) -> None:
    train, test = Dataset(data), Dataset(f"{data}-test")
    evaluated = json.loads(thermopile("eval", run, "--train", data, "--test", f"{data}-test", "--json"))["scores"]
    with TemporaryDirectory() as folder, torch.inference_mode():
        thermopile("export", run, "--to", f"{folder}/models", "--format", "hf")
        models = Path(folder, "models")
        pictures = of_pictures(models / "image", test, root)
        if (models / "text").exists():
            captions = test.column("caption").to_pylist()
            number = torch.from_numpy(np.unique(captions, return_inverse=True)[1])
            same = (number[:, None] == number).nonzero().T
            ranks = retrieval_ranks(pictures, of_texts(models / "text", captions), same, ignored)
            scores = [("R@1", evaluated["image_to_text"]["1"]["all"], float((ranks == 0).float().mean()))]
        else:
            names = np.array([*train.column("group").to_pylist(), *test.column("group").to_pylist()])
            labels = torch.from_numpy(np.unique(names, return_inverse=True)[1])
            found = knn(of_pictures(models / "image", train, root), labels[: train.n], pictures, [VOTE], ignored)
            right = float((found[VOTE] == labels[train.n :]).float().mean())
            scores = [("k-NN", evaluated["knn"][str(VOTE.k)]["all"], right)]
    rows = [(name, f"{test.n:,}", f"{100 * ours:.1f} %", f"{100 * other:.1f} %") for name, ours, other in scores]
    click.echo(table(["score", "samples", "thermopile eval", "transformers, from the files"], rows))


def ignored(done: int, total: int) -> None:
    """Progress of what takes no time."""


def of_pictures(model: Path, dataset: Dataset, root: Path) -> Tensor:
    """Return the features of the files that a dataset was made from, float32 [n, d], rows of norm 1."""
    from transformers import AutoImageProcessor, AutoModel

    read: Any = AutoImageProcessor
    encoder, processor, parts = AutoModel.from_pretrained(model).eval(), read.from_pretrained(model), []
    uris = dataset.column("uri").to_pylist()
    for first in range(0, len(uris), AT_ONCE):
        pictures = [Image.open(root / uri) for uri in uris[first : first + AT_ONCE]]
        pixels = processor(images=pictures, return_tensors="pt").pixel_values
        parts.append(projected(model, encoder(pixels).pooler_output.flatten(1)))
    return torch.cat(parts)


def of_texts(model: Path, captions: Sequence[str]) -> Tensor:
    """As of_pictures, for a CLIP text tower."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    read = tokenizer(list(captions), padding=True, truncation=True, return_tensors="pt")
    states = AutoModel.from_pretrained(model).eval()(**read).last_hidden_state
    end = json.loads(load_facts(model)["end_id"])
    return projected(model, states[range(len(captions)), (read["input_ids"] == end).int().argmax(1)])


def load_facts(model: Path) -> dict[str, str]:
    """Return the metadata of the projection head."""
    from safetensors import safe_open

    with safe_open(model / "head.safetensors", "pt") as file:
        facts: dict[str, str] = file.metadata()
    return facts


def projected(model: Path, features: Tensor) -> Tensor:
    head = load_file(model / "head.safetensors")
    return normalize(linear(features, head["weight"], head["bias"]))


if __name__ == "__main__":
    main()
