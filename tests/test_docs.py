"""Code shown in the documentation runs, and its lists are complete."""

import doctest
import importlib.util
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
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_tree_of_errors_is_that_of_the_code():
    """`python setup/errors.py` writes it anew."""
    spec = importlib.util.spec_from_file_location("errors", ROOT / "setup" / "errors.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found, text = script.errors(), script.PAGE.read_text("utf-8")
    assert script.picture(found) == script.PICTURE.read_text("utf-8")
    assert script.page(text, found) == text


def test_no_page_is_longer_than_250_lines_unless_a_command_writes_it():
    written = {"all_settings.md"}
    long = {page.name for page in DOCS.glob("*.md") if len(page.read_text("utf-8").splitlines()) > 250}
    assert long <= written


def test_every_page_stands_in_the_navigation_and_in_the_readme_s_table():
    navigation, readme = (ROOT / "mkdocs.yml").read_text("utf-8"), (ROOT / "README.md").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert f"docs/{page.name}" in navigation
        if not page.name.startswith("figures_"):  # figures.md links to these
            assert f"(docs/{page.name}" in readme


def test_the_page_on_the_code_names_what_is_there():
    rows = [line.split("|")[2:4] for line in (DOCS / "code.md").read_text("utf-8").splitlines() if line.count("|") == 4]
    folders = ("storage", "pipeline", "state_store", "trainer", "tools", "tests")
    defined = "\n".join(file.read_text("utf-8") for each in folders for file in (ROOT / each).rglob("*.py"))
    for files, names in rows:
        for file in re.findall(r"`((?:\w+/)+\w+\.py)`", files + names):
            assert (ROOT / file).is_file(), file
        for name in re.findall(r"`(?:\w+\.)?((?!py`|toml`)[A-Za-z_]+)`", names):
            assert re.search(rf"(def|class) {name}\b|^{name}\b", defined, re.MULTILINE), name


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
