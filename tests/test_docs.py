"""What the documentation shows runs."""

import re
from pathlib import Path

import numpy as np
import torch

from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.trainer.config import DataConfig
from thermopile.trainer.run.build import open_loader

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[1] / "docs"


def test_the_augmentation_of_one_s_own_in_the_documentation_paints_a_grey_square(images_dataset, tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "loading.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "my_augmentations.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    config = DataConfig(
        loader="ffcv", recipe="crop_flip", image_size=32, augmentation="my_augmentations:cut_out", workers=1
    )
    recipe = RECIPES["crop_flip"]
    grey = torch.tensor([(128 / 255 - m) / s for m, s in zip(recipe.mean, recipe.std, strict=True)])
    with open_loader(config, images_dataset, Order.create(images_dataset.n, 64), mode="unimodal", device=CPU) as loader:
        batch = loader.make(np.arange(8), epoch=0)
    for view in torch.cat(batch.views):
        painted = (view - grey[:, None, None]).abs().amax(0) < 1e-5
        assert 64 <= painted.sum() < 128  # a square of 8 × 8, and perhaps a pixel that is grey anyway
