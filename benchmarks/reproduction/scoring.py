"""Which test samples encoders get right: by k-NN and linear probe; of pairs by zero-shot and retrieval too.

On drawings by retrieval alone: few of their classes would have enough test samples.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from tokenizers import Tokenizer
from torch import Tensor, nn

from thermopile.pipeline.opening import Dataset
from thermopile.trainer.config import DataConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.encoders.backbones import Backbone
from thermopile.trainer.evaluation.features import image_features, text_features
from thermopile.trainer.evaluation.scoring import Vote, knn, prompts, retrieval_ranks, sgd_probe, zero_shot
from thermopile.trainer.run.build import recipe_named

from ..icons import rarest_word_counts
from .results import NEIGHBOURS
from .sets import Sets

PROMPT = "the character {lower}"
"""For zero-shot: how the glyphs' captions begin."""
CPU = torch.device("cpu")
NEAR_COPY = 0.95
"""Correlation of pixels from which a picture is another's near-copy."""

Right = dict[str, NDArray[np.bool_]]
"""Measure -> bool [samples of all test sets, one after another]."""


def _nothing(*counted: object) -> None:
    """No progress is shown: runs are made in processes of their own."""


class Scorer:
    """Scores encoders, in evaluation mode, on the test sets of a run."""

    def __init__(self, encoders: Encoders, sets: Sets, data: DataConfig, tokenizer: Tokenizer | None) -> None:
        """tokenizer: the run's own; None without a text encoder."""
        self.sets, self._encoders = sets, encoders
        scored: nn.Module = encoders.image if encoders.text is not None else encoders.image.backbone
        self._features = partial(image_features, recipe=recipe_named(data.recipe), image_size=data.image_size,
                                 device=CPU, on_progress=_nothing)  # fmt: skip
        self._scored = scored
        self._tests = [self._features(scored, dataset=test) for test in sets.tests]
        if encoders.text is not None and tokenizer is not None:
            self._encode = partial(text_features, encoders.text, tokenizer, device=CPU, on_progress=_nothing)

    @cached_property
    def _train(self) -> Tensor:
        return self._features(self._scored, dataset=self.sets.train)

    def right(self) -> Right:
        """Which samples are right, in the order of the test sets' sources."""
        order = self._order()
        return {name: samples[order] for name, samples in self._right().items()}

    def bands(self) -> NDArray[np.int64]:
        """The band of each sample's class, in the same order, int64 [samples]; none on drawings."""
        return np.concatenate([classes.test_bands for classes in self.sets.classes])[self._order()]

    def _order(self) -> NDArray[np.int64]:
        sizes = [test.n for test in self.sets.tests]
        return np.concatenate([
            first + np.argsort(test.shard(0).records()["source_index"])
            for test, first in zip(self.sets.tests, np.cumsum(sizes) - sizes, strict=True)
        ])  # fmt: skip

    def _right(self) -> Right:
        return self._classified() | ({} if self._encoders.text is None else self._retrieved())

    def _classified(self) -> Right:
        if not (classes := self.sets.classes):
            return {}
        test, truth = torch.cat(self._tests), np.concatenate([each.test for each in classes])
        labels, vote = torch.from_numpy(classes[0].train), Vote(NEIGHBOURS)
        predicted = {
            "knn": knn(self._train, labels, test, [vote], _nothing)[vote],
            "probe": sgd_probe(self._train, labels, test, _nothing),
        }
        if self._encoders.text is not None:
            predicted["zero_shot"] = zero_shot(test, self._encode(prompts(classes[0].names, (PROMPT,))), 1).argmax(1)
        return {name: codes.numpy() == truth for name, codes in predicted.items()}

    def _retrieved(self) -> Right:
        found = [self._retrieved_of(*each) for each in zip(self.sets.tests, self._tests, strict=True)]
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}

    def _retrieved_of(self, test: Dataset, images: Tensor) -> Right:
        """R@1 within one test set, of each image and of each image's caption."""
        texts, of_image = np.unique(test.column("caption").to_pylist(), return_inverse=True)
        place = torch.from_numpy(of_image)
        pairs = torch.stack([torch.arange(len(place)), place])
        features = self._encode(texts.tolist())
        to_text = retrieval_ranks(images, features, pairs, _nothing)
        to_image = retrieval_ranks(features, images, pairs.flip(0), _nothing)[place]
        return {"image_to_text": (to_text == 0).numpy(), "text_to_image": (to_image == 0).numpy()}

    def alignment(self, ids: NDArray[np.int64], tau: NDArray[np.float64]) -> float | None:
        """Spearman's correlation of training samples' tau, float64 [m], and the similarity of picture and caption."""
        if self._encoders.text is None:
            return None
        texts, of_image = np.unique(self.sets.train.column("caption").to_pylist(), return_inverse=True)
        similarity = (self._train * self._encode(texts.tolist())[torch.from_numpy(of_image)]).sum(1)
        return float(spearmanr(tau, similarity[ids].numpy()).statistic)

    def near_copies(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of near-copies among the others of these training samples, int64 [m]."""
        pixels = self._features(GreyPixels(0), dataset=self.sets.train)
        some = np.array_split(ids, len(ids) // 500 + 1)  # 200 MB of correlations at once, of 100,000 pictures
        parts = [(pixels[part] @ pixels.T > NEAR_COPY).sum(1) for part in some]
        counts: NDArray[np.int64] = torch.cat(parts).numpy() - 1
        return counts

    def word_counts(self) -> NDArray[np.int64]:
        """In how many captions the rarest word of each training sample's is, int64 [n]."""
        captions = self.sets.train.column("caption").to_pylist()
        return rarest_word_counts(captions, captions)


class GreyPixels(Backbone):
    """The pixels of a view in grey, less their mean: nearer to its neighbours of the same class than in colour."""

    def forward(self, views: Tensor) -> Tensor:
        """float32 [b, 3, H, W] → [b, H · W]."""
        grey = views.mean(1).flatten(1)
        return grey - grey.mean(1, keepdim=True)
