"""What the documentation shows runs."""

import doctest
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import thermopile
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.trainer.config import DataConfig
from thermopile.trainer.run.build import open_loader

from support.pictures import draw

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


WITH_EXAMPLES = (
    "convert", "train", "inspect", "evaluate", "embed", "export", "open_run", "StateReader", "Loader", "RowStore",
)  # fmt: skip


@pytest.mark.wide
def test_the_examples_in_docstrings_run_one_after_another_on_the_first_one_s_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    for number in range(96):
        draw(number).save(f"pictures/{number}.png")
        Path(f"pictures/{number}.txt").write_text(f"picture {number} of {number % 7}")
    names = {"thermopile": thermopile, "torch": torch}
    runner, failures = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    found = [
        (name, test)
        for name in dict.fromkeys([*WITH_EXAMPLES, *thermopile.__all__])
        for test in doctest.DocTestFinder().find(getattr(thermopile, name), name, False, globs=names.copy())
        if test.examples
    ]
    assert [name for name, _ in found] == [*WITH_EXAMPLES]
    for _, test in found:
        runner.run(test, out=failures.append)
    assert failures == []
