"""`thermopile show`: samples and their views on one page."""

import base64
import io
import re
import shutil
from functools import partial

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.tools.report.html import document, part
from thermopile.tools.sample_sheet import ShownSample, ShownView, shown_samples
from thermopile.trainer.config import load_config
from thermopile.trainer.run.build import resolve

from support.cli import cli
from support.conversions import dataset_of
from support.page import Page

show = partial(cli, "show")

STORED, FIRST, SECOND = (250, 0, 0), (0, 250, 0), (0, 0, 250)


def sheet(name, facts, samples):
    return document("Samples of", name, facts, "", [], {"Pictures": part("sections.html", "views", samples)})


def test_a_sheet_is_written_and_named(images_dataset, tmp_path):
    done = show(images_dataset.path, "--out", tmp_path / "sheet.html", "--samples", 3, "--image-size", 32)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'sheet.html'}: 3 of 300 samples, recipe crop_flip\n"
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.html"]
    assert len(Page((tmp_path / "sheet.html").read_text("utf-8")).of("img")) == 9


def test_recipe_epoch_seed_and_ids_are_what_is_shown(images_dataset, tmp_path):
    def sheet(*options):
        out = ("--out", tmp_path / "sheet.html", "--overwrite", "--image-size", 16)
        assert show(images_dataset.path, *out, *options).exit_code == 0
        return (tmp_path / "sheet.html").read_bytes()

    plain = sheet("--ids", "1,2")
    assert plain == sheet("--ids", "1,2")
    others = (("--ids", "2,1"), ("--ids", "1,2", "--recipe", "simclr"), ("--ids", "1,2", "--epoch", 1),
              ("--ids", "1,2", "--seed", 1), ("--samples", 2))  # fmt: skip
    assert len({plain, *(sheet(*options) for options in others)}) == 6


def test_the_views_are_those_that_training_makes(images_dataset):
    recipe, order = RECIPES["simclr"], Order.create(images_dataset.n, 32, seed=3)
    with FFCVLoader(images_dataset, order, recipe=recipe, image_size=24, views=2) as loader:
        batch = next(loader.epoch(1))
    ids = batch.sample_ids.numpy()[[5, 0, 17]]
    shown = shown_samples(images_dataset, ids, "simclr", seed=3, epoch=1, image_size=24)
    assert [sample.sample_id for sample in shown] == ids.tolist()
    for sample, row in zip(shown, (5, 0, 17), strict=True):
        assert [view.name for view in sample.views] == ["view 1", "view 2"]
        for view, pixels in zip(sample.views, batch.views, strict=True):
            again = (np.asarray(view.picture) / 255 - recipe.mean) / recipe.std
            # Shown in whole levels: half a level of 255, over the smallest std, is 0.0088.
            assert np.abs(again - pixels[row].permute(1, 2, 0).numpy()).max() < 0.009


def test_frames_enclose_what_a_view_was_made_of(images_dataset):
    for sample in shown_samples(images_dataset, np.arange(8), "crop_flip", seed=0, epoch=0, image_size=24):
        for view in sample.views:
            crop = sample.stored.convert("RGB").resize((24, 24), Image.Resampling.BILINEAR, box=view.box)
            as_seen = [crop, crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
            assert min(np.abs(np.asarray(view.picture).astype(int) - np.asarray(one)).mean() for one in as_seen) < 2


def test_pairs_are_shown_in_two_epochs_for_they_have_one_view(pairs_dataset):
    ids = np.array([7, 300, 1999])
    now, later = (shown_samples(pairs_dataset, ids, "clip", seed=0, epoch=epoch, image_size=32) for epoch in (4, 5))
    for sample, next_sample, row in zip(now, later, pairs_dataset.rows(ids.tolist()), strict=True):
        assert [view.name for view in sample.views] == ["epoch 4", "epoch 5"]
        assert sample.views[1].picture.tobytes() == next_sample.views[0].picture.tobytes()
        assert (sample.caption, sample.group) == (row["caption"], row["group"])
    # Two draws can be the same crop, but not everywhere.
    assert any(sample.views[0].box != sample.views[1].box for sample in now)


@pytest.mark.parametrize("name", ["pairs_dataset", "images_dataset"])
def test_recipe_and_size_are_those_that_training_would_choose(name, request, tmp_path):
    dataset = request.getfixturevalue(name)
    config = resolve(load_config({"data": {"path": str(dataset.path)}, "batch_size": 16}), dataset)[0]
    for asked in (["--recipe", "auto"], ["--overwrite"]):
        done = show(dataset.path, "--out", tmp_path / "sheet.html", "--samples", 1, *asked)
        assert done.stdout.endswith(f"recipe {config.data.recipe}\n")
    page = (tmp_path / "sheet.html").read_text("utf-8")
    assert f"views {config.data.image_size}×{config.data.image_size}" in page


def test_a_recipe_of_ones_own_is_announced_and_shown(images_dataset, tmp_path):
    done = show(images_dataset.path, "--out", tmp_path / "a.html", "--samples", 1, "--recipe", "support.own_code:SOFT")
    assert done.stdout.endswith("recipe support.own_code:SOFT\n")
    assert "imports the recipe = support.own_code:SOFT from " in done.stderr
    assert_refused(
        show(images_dataset.path, "--out", tmp_path / "b.html", "--recipe", "support.own_code:Gone"), 2, "Gone"
    )


def sample(sample_id=0, group="", caption="", side=128):
    box = (2, 2, 30, 20)
    views = (ShownView("view 1", Image.new("RGB", (side, side), FIRST), box),
             ShownView("view 2", Image.new("RGB", (side, side), SECOND), box))  # fmt: skip
    return ShownSample(sample_id, group, caption, Image.new("RGB", (40, 30), STORED), views)


def shown(*samples):
    """The page as a browser would read it."""
    return Page(sheet("data <b>", "facts", samples))


def frames(sample):
    """The stored picture of a sample as it is shown."""
    ((_, uri, _), *_) = sample.pictures
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")).astype(int)


def test_a_card_has_the_stored_picture_both_views_and_what_is_known_of_the_sample():
    page = shown(sample(7, "dogs", "a dog"), sample(8))
    assert [picture["alt"] for picture in page.of("img")] == [
        f"{name} of sample {id}" for id in (7, 8) for name in ("stored 40×30", "view 1", "view 2")
    ]
    assert all(picture["src"].startswith("data:image/jpeg;base64,") for picture in page.of("img"))
    assert page.within("b") == ["id 7", "id 8"]
    assert page.within("bdi")[-2:] == ["dogs", "a dog"]


def test_pixels_of_small_pictures_are_not_smoothed():
    assert [picture.get("class") for side in (32, 224) for picture in shown(sample(side=side)).of("img")] == [
        None, "pixels", "pixels", None, None, None
    ]  # fmt: skip


@pytest.mark.parametrize("size", [(40, 30), (4000, 5), (5, 4000)])
def test_the_crop_of_each_view_has_a_frame_of_its_colour_also_on_a_long_thin_picture(size):
    stored = Image.new("RGB", size, STORED)
    box = (1, 1, 3, 4)
    views = tuple(ShownView(f"view {i}", Image.new("RGB", (128, 128), FIRST), box) for i in (1, 2))
    pixels = frames(ShownSample(0, "", "", stored, views))
    assert max(pixels.shape) == 384
    assert (np.abs(pixels - (0xD5, 0x5E, 0)).max(2) < 40).sum() > 4  # the second, which covers the first


def test_a_dataset_of_one_sample_is_shown(tmp_path):
    (tmp_path / "one").mkdir()
    Image.new("RGB", (4000, 5), STORED).save(tmp_path / "one" / "long.png")
    dataset_of(FolderSource(tmp_path / "one"), tmp_path / "data")
    done = show(tmp_path / "data", "--out", tmp_path / "sheet.html", "--image-size", 16)
    assert done.stdout == f"{tmp_path / 'sheet.html'}: 1 of 1 samples, recipe crop_flip\n"


HOSTILE = [
    "\u202egnp.elif\u202c \x00\x07\x1b[31mred\x1b[0m",
    "x" * 10_000,
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)> '&amp;'",
    "\ud800 lone",
]


def test_any_text_is_shown_as_text():
    html = sheet(HOSTILE[2], HOSTILE[3], [sample(i, text, text) for i, text in enumerate(HOSTILE)])
    page = Page(html)
    assert len(page.of("img")) == 3 * len(HOSTILE)
    assert len(page.of("script")) == 1
    assert "<script>alert(1)</script>" in page.text("h1")
    for text in ("[U+202E]gnp.elif[U+202C] [U+0000][U+0007][U+001B][31mred", *HOSTILE[2:4], "[U+D800] lone"):
        assert page.text("li").count(text) == 2
    assert "x" * 201 not in html


def assert_refused(done, exit_code, message):
    assert done.exit_code == exit_code, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert re.search(message, line)
    assert "Traceback" not in done.stderr


def test_an_existing_file_is_replaced_only_where_that_is_asked_for(images_dataset, tmp_path):
    out = tmp_path / "sheet.html"
    out.write_bytes(b"mine")
    options = ("--out", out, "--samples", 1, "--image-size", 16)
    assert_refused(show(images_dataset.path, *options), 2, r"exists; choose another name, or .* --overwrite")
    assert out.read_bytes() == b"mine"
    assert show(images_dataset.path, *options, "--overwrite").exit_code == 0
    assert Page(out.read_text("utf-8")).of("img")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "simclear"], "'simclear' is unknown; available: auto, clip, crop_flip"),
        (["--ids", "3,300"], "sample 300 does not exist; the dataset holds 0 to 299"),
        (["--ids", "-1"], "sample -1 does not exist"),
        (["--ids", "9" * 40], "sample 9999"),
        (["--ids", "1,two"], "'1,two' is not a list of ids such as 1,5,9"),
        (["--ids", ""], "is not a list of ids"),
        (["--ids", ",".join(["1"] * 201)], "201 ids; a sheet shows at most 200"),
        (["--samples", "0"], "--samples"),
        (["--out", "sheet.jpg"], r"does not end in \.html"),
        (["--out", "absent/sheet.html"], "absent does not exist"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(images_dataset, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert_refused(show(images_dataset.path, "--out", "sheet.html", *options), 2, message)
    assert not list(tmp_path.iterdir())


def test_a_picture_damaged_on_disk_is_one_line(images_dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(images_dataset.path, copy)
    (shard,) = (copy / "shards").glob("*.beton")
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"\xff\xd8\xff", b"\0\0\0"))
    assert_refused(show(copy, "--out", tmp_path / "a.html", "--samples", 2), 1, "Convert the dataset again")
