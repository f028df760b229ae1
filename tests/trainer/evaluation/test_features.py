"""What the encoders are shown: the central square of each picture, in the order of the ids."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from thermopile.pipeline.views.recipes import IMAGENET_MEAN, IMAGENET_STD, RECIPES
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.errors import RunError
from thermopile.trainer.evaluation.features import evaluation_recipe, image_features

from support.features import sample_features

CPU = torch.device("cpu")


def quiet(done, total):
    pass


def test_the_view_is_the_central_square_normalised_as_in_training(images_dataset):
    done = []
    features = image_features(nn.Flatten(), images_dataset, RECIPES["simclr"], 24, CPU, lambda *at: done.append(at))
    assert done == [(256, 300), (300, 300)]
    assert features.shape == (300, 3 * 24 * 24)
    unscaled = [i for i, height in enumerate(images_dataset.column("height").to_pylist()) if height == 24]
    assert max(unscaled) >= 256
    for sample in unscaled:
        picture = np.asarray(Image.open(io.BytesIO(images_dataset.jpeg(sample))), np.float32)
        # The decoder and Pillow round differently, so the square is recognised by what it resembles most.
        likeness = [float(of_square(picture[:, left : left + 24]) @ features[sample])
                    for left in range(picture.shape[1] - 23)]  # fmt: skip
        assert int(np.argmax(likeness)) == (picture.shape[1] - 24) // 2
        assert max(likeness) > 0.999


def of_square(pixels):
    """Pixels float32 [H, W, 3] in 0 … 255 as a feature, float32 [3 H W]."""
    normalised = ((pixels / 255 - IMAGENET_MEAN) / IMAGENET_STD).astype(np.float32)
    return F.normalize(torch.from_numpy(normalised.transpose(2, 0, 1).flatten()), dim=0)


def test_the_recipe_keeps_the_normalisation_and_nothing_random():
    recipe = evaluation_recipe(RECIPES["clip"])
    assert (recipe.mean, recipe.std) == (RECIPES["clip"].mean, RECIPES["clip"].std)
    assert recipe.flip == 0
    assert not any((recipe.has_colour, recipe.has_blur, recipe.has_solarise))
    assert recipe.scale == recipe.ratio == (1, 1)


def test_features_that_are_not_finite_are_refused(images_dataset):
    class Broken(nn.Module):
        def forward(self, pixels):
            return torch.full((len(pixels), 2), torch.nan)

    with pytest.raises(RunError, match="not finite"):
        image_features(Broken(), images_dataset, RECIPES["clip"], 24, CPU, quiet)


class Mean(nn.Module):
    """Pictures or tokens → the mean of each channel, or some of the tokens."""

    def forward(self, inputs):
        return inputs.mean((2, 3)) if inputs.ndim == 4 else inputs[:, :3].float()


def test_chosen_samples_and_their_captions_have_the_features_they_have_among_all(pairs_dataset):
    ids = np.array([1999, 3, 700, 3])
    view = (RECIPES["clip"], 32, CPU)
    pictures, captions = sample_features(Encoders(Mean(), Mean()), pairs_dataset, ids, *view)
    assert torch.equal(pictures, image_features(Mean(), pairs_dataset, *view, quiet)[ids])
    tokens = torch.from_numpy(pairs_dataset.shard(0).tokens(ids))
    assert torch.equal(captions, F.normalize(tokens[:, :3].float(), dim=-1))
    (alone,) = sample_features(Encoders(Mean(), None), pairs_dataset, ids, *view)
    assert torch.equal(alone, pictures)
