"""`thermopile show`: samples and their views on one sheet."""

import io
import re
import shutil
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.tools.printing import plain_text
from thermopile.tools.report.figures import lettering
from thermopile.tools.report.figures.lettering import Lettering
from thermopile.tools.sample_sheet import ShownSample, ShownView, draw_sheet, shown_samples
from thermopile.tools.show import RECIPE_NAMES
from thermopile.trainer.config import load_config
from thermopile.trainer.run.build import resolve

from support.cli import cli
from support.conversions import dataset_of

show = partial(cli, "show")

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
BODY = Lettering(15, bold=False, fallback={})
STORED, FIRST, SECOND = (250, 0, 0), (0, 250, 0), (0, 0, 250)


def format_of(path):
    return Image.open(io.BytesIO(path.read_bytes())).format


def test_a_sheet_is_written_and_named(images_dataset, tmp_path):
    done = show(images_dataset.path, "--out", tmp_path / "sheet.png", "--samples", 3, "--image-size", 32)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'sheet.png'}: 3 of 300 samples, recipe crop_flip\n"
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]
    assert format_of(tmp_path / "sheet.png") == "PNG"


def test_recipe_epoch_seed_and_ids_are_what_is_shown(images_dataset, tmp_path):
    def sheet(*options):
        out = ("--out", tmp_path / "sheet.png", "--overwrite", "--image-size", 16)
        assert show(images_dataset.path, *out, *options).exit_code == 0
        return (tmp_path / "sheet.png").read_bytes()

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


def test_the_recipes_are_those_of_the_loaders():
    assert tuple(RECIPES) == RECIPE_NAMES


@pytest.mark.parametrize("name", ["pairs_dataset", "images_dataset"])
def test_the_recipe_is_the_one_that_training_would_choose(name, request, tmp_path):
    dataset = request.getfixturevalue(name)
    config = resolve(load_config({"data": {"path": str(dataset.path)}, "batch_size": 16}), dataset)
    done = show(dataset.path, "--out", tmp_path / "sheet.png", "--samples", 1, "--image-size", 16)
    assert done.stdout.endswith(f"recipe {config.data.recipe}\n")


def sample(sample_id=0, group="", caption="", side=128):
    box = (2, 2, 30, 20)
    views = (ShownView("view 1", Image.new("RGB", (side, side), FIRST), box),
             ShownView("view 2", Image.new("RGB", (side, side), SECOND), box))  # fmt: skip
    return ShownSample(sample_id, group, caption, Image.new("RGB", (40, 30), STORED), views)


def places(sheet, colour):
    """bool [H, W]: where the sheet has this colour."""
    return (np.asarray(sheet) == colour).all(-1)


@pytest.mark.parametrize(("side", "tile"), [(32, 128), (100, 200), (128, 128), (224, 224), (600, 320)])
def test_views_are_tiles_of_a_readable_size(side, tile):
    sheet = draw_sheet("title", "facts", [sample(side=side)])
    assert places(sheet, FIRST).sum() == places(sheet, SECOND).sum() == tile * tile
    assert places(sheet, STORED).sum() > 0.5 * tile * tile * 3 / 4  # less the frames


def test_tiles_stand_in_columns_and_rows():
    sheet = draw_sheet("title", "facts", [sample(i, group="g", caption="word " * i) for i in range(7)])
    assert sheet.width <= 1500 + 2 * 24
    first = places(sheet, FIRST)
    columns, rows = first.sum(0), first.sum(1)
    # Three cells a row; seven samples are three, three and one.
    assert set(columns.tolist()) == {0, 2 * 128, 3 * 128}
    assert set(rows.tolist()) == {0, 128, 3 * 128}
    assert (rows == 3 * 128).sum() == 2 * 128


def test_what_is_known_of_a_sample_is_written_below_it():
    plain, with_group, with_caption = (
        draw_sheet("t", "f", [one]) for one in (sample(), sample(group="dogs"), sample(caption="a dog"))
    )
    assert plain.size == with_group.size != with_caption.size
    assert plain.tobytes() != with_group.tobytes()


@pytest.mark.parametrize("size", [(4000, 5), (5, 4000)])
def test_a_long_thin_picture_is_shown_with_its_crops(size):
    long = Image.new("RGB", size, STORED)
    box = (1, 1, 3, 4)
    views = tuple(ShownView(f"view {i}", Image.new("RGB", (128, 128), FIRST), box) for i in (1, 2))
    sheet = draw_sheet("t", "f", [ShownSample(0, "", "", long, views)])
    assert places(sheet, (0xD5, 0x5E, 0)).sum() > 4  # the frame of the second view, in its colour


def test_a_dataset_of_one_sample_is_shown(tmp_path):
    (tmp_path / "one").mkdir()
    Image.new("RGB", (4000, 5), STORED).save(tmp_path / "one" / "long.png")
    dataset_of(FolderSource(tmp_path / "one"), tmp_path / "data")
    done = show(tmp_path / "data", "--out", tmp_path / "sheet.png", "--image-size", 16)
    assert done.stdout == f"{tmp_path / 'sheet.png'}: 1 of 1 samples, recipe crop_flip\n"


def test_characters_that_no_font_has_are_written_by_their_numbers(monkeypatch):
    monkeypatch.setattr(lettering, "_system_fonts", list)
    letters = Lettering.covering(["日本 été \U0001f9a5"], 15)
    assert letters.drawable("日本 été \U0001f9a5") == "[U+65E5 U+672C] été [U+1F9A5]"
    assert letters.drawable("a dog") == "a dog"


def test_characters_that_another_font_of_the_system_has_are_drawn_in_it(monkeypatch):
    script = "\U0001d49c"  # a letter of STIX's, not of DejaVu's
    damaged = Path(__file__)
    monkeypatch.setattr(lettering, "_system_fonts", lambda: [str(damaged), str(FONTS / "STIXGeneral.ttf")])
    line = Lettering.covering([f"a{script}b"], 15)
    assert line.drawable(f"a{script}b") == f"a{script}b"
    assert line.length(f"a{script}b") == pytest.approx(BODY.length("ab") + line.length(script))
    assert line.length(script) != BODY.length(script)
    (plain, shown) = (draw_sheet("t", "f", [sample(caption=text)]) for text in ("a b", f"a{script}b"))
    assert plain.tobytes() != shown.tobytes()


HOSTILE = [
    "\u202egnp.elif\u202c \u2066isolated\u2069 \x00\x07\x1b[31mred\x1b[0m",
    "x" * 10_000,
    "",
    " \n\t ",
    "$\\frac{1}{2}$ [b]",
    "漢字とかな交じりの文章は空白なしに続く" * 9,
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "\ud800 lone",
    "e\u0301" * 99,
]


def test_any_text_is_drawn_without_harm():
    samples = [sample(i, group=plain_text(text), caption=plain_text(text)) for i, text in enumerate(HOSTILE)]
    sheet = draw_sheet(plain_text(HOSTILE[0]), plain_text(HOSTILE[1]), samples)
    assert places(sheet, FIRST).sum() == len(HOSTILE) * 128 * 128
    assert draw_sheet("", "", [sample()]).width > 0


@given(text=st.text(max_size=60), width=st.integers(20, 300), lines=st.integers(1, 4))
def test_wrapped_lines_fit_and_nothing_is_lost_without_a_mark(text, width, lines):
    text = plain_text(text)
    broken = BODY.wrapped(text, width, lines)
    assert len(broken) <= lines
    assert all(BODY.length(line) <= width or len(line) <= 2 for line in broken)
    if not any(line.endswith("…") for line in broken):
        assert "".join("".join(broken).split()) == "".join(text.split())


def test_lines_are_broken_between_words():
    assert BODY.wrapped("a dog on the grass", 90, lines=3) == ["a dog on", "the grass"]
    assert BODY.wrapped("a dog on the grass", 90, lines=1) == ["a dog on…"]


def assert_refused(done, exit_code, message):
    assert done.exit_code == exit_code, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert re.search(message, line)
    assert "Traceback" not in done.stderr


def test_an_existing_file_is_replaced_only_where_that_is_asked_for(images_dataset, tmp_path):
    out = tmp_path / "sheet.png"
    out.write_bytes(b"mine")
    options = ("--out", out, "--samples", 1, "--image-size", 16)
    assert_refused(show(images_dataset.path, *options), 2, r"exists; choose another file, or .* --overwrite")
    assert out.read_bytes() == b"mine"
    assert show(images_dataset.path, *options, "--overwrite").exit_code == 0
    assert format_of(out) == "PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "simclear"], "'simclear' is not one of 'clip', 'crop_flip'"),
        (["--ids", "3,300"], "sample 300 does not exist; the dataset holds 0 to 299"),
        (["--ids", "-1"], "sample -1 does not exist"),
        (["--ids", "9" * 40], "sample 9999"),
        (["--ids", "1,two"], "'1,two' is not a list of ids such as 1,5,9"),
        (["--ids", ""], "is not a list of ids"),
        (["--ids", ",".join(["1"] * 201)], "201 ids; a sheet shows at most 200"),
        (["--samples", "0"], "--samples"),
        (["--out", "sheet.jpg"], r"does not end in \.png"),
        (["--out", "absent/sheet.png"], "folder absent does not exist"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(images_dataset, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert_refused(show(images_dataset.path, "--out", "sheet.png", *options), 2, message)
    assert not list(tmp_path.iterdir())


def test_a_picture_damaged_on_disk_is_one_line(images_dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(images_dataset.path, copy)
    (shard,) = (copy / "shards").glob("*.beton")
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"\xff\xd8\xff", b"\0\0\0"))
    assert_refused(show(copy, "--out", tmp_path / "a.png", "--samples", 2), 1, "Convert the dataset again")
