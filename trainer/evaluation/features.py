"""Features of a dataset, or of chosen samples, from the encoders of a run's checkpoint."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from ...pipeline.batch import Batch
from ...pipeline.dataset.index import TokenizerInfo
from ...pipeline.dataset.samples_table import CAPTION
from ...pipeline.dataset.tokenizer import encode
from ...pipeline.opening import Dataset
from ...pipeline.views.recipes import Recipe
from ...state_store.ranks import agreement
from ...storage.arrays import Int64s
from ...storage.gpu_copies import Arriving, Copies, CudaDevice
from ...storage.place import Place
from ..config import TrainConfig, Weights
from ..encoders import Encoders
from ..errors import RunError, one_line
from ..plugins import CODE_OF_FEATURES, announce_code, code_in, refuse_code
from ..world import ALONE, World
from .scoring import OnCount

BATCH = 256
AHEAD = 2
"""Batches made while the encoders work on another."""


def restore_encoders(
    config: TrainConfig,
    checkpoint: Place,
    training: dict[str, Any],
    tokenizer: TokenizerInfo | None,
    weights: Weights | None = None,
    *,
    allow_code: bool = False,
) -> Encoders:
    """Return the encoders of a checkpoint, on the CPU, in evaluation mode.

    training: as returned by load_checkpoint for `checkpoint`. tokenizer: the run's dataset's. weights: of the image and
    the text encoder, by default averaged if the run has averages. allow_code: whether encoders and recipe may be a
    user's own, which are then imported.
    Raises RunError if the checkpoint does not fit the settings, ConfigError as ModelConfig.chosen_weights, or for code.
    """
    code = code_in(config, CODE_OF_FEATURES)
    if not allow_code:
        refuse_code(code, checkpoint.parent.parent / "config.toml")
    announce_code(code)
    averaged = config.model.chosen_weights(weights) == "averaged"
    mode, image_size = config.objective.mode, config.data.image_size
    encoders = Encoders.create(config.model, mode, image_size, tokenizer, pretrained=False)
    try:
        encoders.load_state_dict(training["encoders"] | (training["averaged"] if averaged else {}))
    except (KeyError, TypeError, RuntimeError) as error:
        raise RunError(f"{checkpoint} does not contain the encoders of the settings ({one_line(error)})") from error
    return encoders.eval()


def evaluation_recipe(trained: Recipe) -> Recipe:
    """Return a recipe for the largest central square of an image, without augmentation, normalised as in training.

    If the image's sides differ by one pixel, the square may be one pixel off centre, the same in every view.
    """
    return Recipe(scale=(1, 1), ratio=(1, 1), flip=0, mean=trained.mean, std=trained.std)


def image_features(
    encoder: nn.Module,
    dataset: Dataset,
    recipe: Recipe,
    image_size: int,
    device: torch.device,
    on_progress: OnCount,
    world: World = ALONE,
    sample_ids: Int64s | None = None,
    *,
    epoch: int | None = None,
    unit_norm: bool = True,
) -> Tensor:
    """Return the features of n images, all in id order or the chosen ones, float32 [n, d] on `device`.

    on_progress: called with the number of images done, and n. world: its ranks take turns with the batches; all call
    this, and the first has the result. epoch: of an augmented view, as the recipe draws it; None: the image itself.
    unit_norm: whether features are divided by their norm. Raises DatasetError for an image that does not decode,
    RunError if a feature is not finite or another rank fails.
    """
    view = (evaluation_recipe(recipe) if epoch is None else recipe, image_size, device)
    ids = np.arange(dataset.n) if sample_ids is None else sample_ids
    made = _of_samples(encoder, None, dataset, ids, *view, epoch=epoch or 0, unit_norm=unit_norm, world=world)
    return _together(made, len(ids), on_progress, world)[0].to(device)


def some_features(
    encoders: Encoders,
    dataset: Dataset,
    sample_ids: Int64s | None,
    recipe: Recipe,
    image_size: int,
    device: torch.device,
    *,
    views: int = 0,
    tokenizer: Tokenizer | None = None,
    rows: int = BATCH,
) -> Generator[list[Tensor], None, None]:
    """Yield the heads' features of samples in their order, `rows` at a time, float32 [rows, d] on `device`.

    Rows have norm 1. sample_ids: int64 [m]; None: all, whose captions are read as they are needed. views: of each
    picture, as the recipe draws them for training; 0: the picture itself, and for pairs the first caption, or "".
    tokenizer: the run's own. None: the dataset's tokens are the run's. Raises as image_features does.
    """
    view = (recipe if views else evaluation_recipe(recipe), image_size, device)
    text, tokens = None if views else encoders.text, None
    if tokenizer and text is not None and dataset.index.mode == "pairs":
        if sample_ids is None:
            tables = dataset.tables([CAPTION], rows)
        else:
            chosen = dataset.take(sample_ids, [CAPTION])
            tables = (chosen.slice(first, rows) for first in range(0, len(chosen), rows))
        texts = ([caption or "" for caption in table[CAPTION].to_pylist()] for table in tables)
        tokens = (torch.from_numpy(encode(tokenizer, each).tokens) for each in texts)
    ids = np.arange(dataset.n) if sample_ids is None else sample_ids
    return _of_samples(encoders.image, text, dataset, ids, *view, rows=rows, views=views or 1, tokens=tokens)


def _of_samples(
    image: nn.Module,
    text: nn.Module | None,
    dataset: Dataset,
    sample_ids: Int64s,
    recipe: Recipe,
    image_size: int,
    device: torch.device,
    *,
    rows: int = BATCH,
    views: int = 1,
    epoch: int = 0,
    tokens: Iterator[Tensor] | None = None,
    unit_norm: bool = True,
    world: World = ALONE,
) -> Generator[list[Tensor], None, None]:
    """Yield features, `rows` samples at a time, of this rank's batches. tokens: of each, in place of the dataset's.

    A thread makes the next batches, and copies them to a GPU, while the encoders work on the one before.
    """
    from ...pipeline.loading.ffcv_loader import ViewMaker  # needs ffcv, which training does not
    from ...pipeline.loading.reader import own_thread

    if device.type == "cuda":  # with its number, since the thread below begins with GPU 0
        device = torch.empty(0, device=device).device
    copies = Copies(CudaDevice(device)) if device.type == "cuda" else None
    starts = iter(range(rows * world.rank, len(sample_ids), rows * world.size))
    asked: dict[str, Any] = {"recipe": recipe, "image_size": image_size, "views": views, "workers": world.cores}

    def make(first: int) -> tuple[Batch, Arriving | None]:
        batch = maker.make(sample_ids[first : first + rows], epoch=epoch)
        batch = replace(batch, tokens=next(tokens)) if tokens else batch
        return batch, copies.upload([view.pin_memory() for view in batch.views]) if copies else None

    with ViewMaker(dataset, spare=AHEAD + 1, **asked) as maker, own_thread(device.index) as thread:
        coming = deque(thread.submit(make, first) for first in islice(starts, AHEAD))
        while coming:
            batch, arriving = coming.popleft().result()
            coming.extend(thread.submit(make, first) for first in islice(starts, 1))
            with torch.inference_mode():
                features = [image(view) for view in (arriving.here() if arriving else batch.views)]
                if text is not None and batch.tokens is not None:
                    features.append(text(batch.tokens.to(device)))
            yield [_finite_rows(of_side, unit_norm) for of_side in features]


def _together(
    batches: Generator[list[Tensor], None, None], total: int, on_progress: OnCount, world: World = ALONE
) -> list[Tensor]:
    """Concatenate the features of all ranks' batches on the first rank; the others get an empty tensor."""
    parts, done, ranks = list[list[Tensor]](), 0, world.slow_group
    with closing(batches):
        while done < total:
            with agreement(ranks, RunError):
                own = next(batches, None)
                done = min(done + BATCH * world.size, total)
                on_progress(done, total)
            if world.size > 1 and own is not None:
                own = [of_side.cpu() for of_side in own]
            parts += filter(None, ranks.gather(own))
    return [torch.cat(of_side) for of_side in zip(*parts, strict=True)] or [torch.empty(0)]


def text_features(
    encoder: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    device: torch.device,
    on_progress: OnCount,
    world: World = ALONE,
) -> Tensor:
    """Return the features of texts (at least one), in order, float32 [texts, d] on `device`, rows of norm 1.

    tokenizer: from load_tokenizer. on_progress: called with the number of texts done, and the total. world: as
    image_features. Raises DatasetError if a text cannot be encoded, RunError as image_features.
    """

    def batches() -> Generator[list[Tensor], None, None]:
        for first in range(BATCH * world.rank, len(texts), BATCH * world.size):
            tokens = torch.from_numpy(encode(tokenizer, texts[first : first + BATCH]).tokens)
            with torch.inference_mode():
                features = encoder(tokens.to(device))
            yield [_finite_rows(features)]

    return _together(batches(), len(texts), on_progress, world)[0].to(device)


def _finite_rows(features: Tensor, unit_norm: bool = True) -> Tensor:
    """Check and normalise, outside inference mode: a probe cannot be trained on inference tensors."""
    features = F.normalize(features.float(), dim=-1) if unit_norm else features.float()
    if not features.isfinite().all():
        raise RunError("the checkpoint's encoders give features that are not finite; choose an older one with --at")
    return features
