"""`thermopile bench loader` at its small scale: what it measures and prints, never how fast it was."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from thermopile.pipeline.augment import RECIPES
from thermopile.pipeline.ffcv_loader import FFCVLoader
from thermopile.tools.bench.loader.cases import CASES, FFCV, FFCV_OWN, NAMES, PILLOW
from thermopile.tools.bench.loader.command import PARTS
from thermopile.tools.bench.loader.contenders import configured
from thermopile.tools.bench.loader.decode import decode_only, decode_rows
from thermopile.tools.bench.loader.material import prepare
from thermopile.tools.bench.loader.pillow_views import PillowViews
from thermopile.tools.bench.loader.rate import images_per_second
from thermopile.tools.bench.loader.resize import psnr
from thermopile.tools.bench.loader.sizes import FULL, SMALL
from thermopile.tools.cli import main

FIGURES = {
    "single": ["ffcv_over_ffcv_own", "ffcv_over_pillow", "ffcv_over_decode", "dali_over_ffcv_own", "dali_over_pillow",
               "dali_over_decode"],
    "two_views": ["ffcv_over_ffcv_own", "ffcv_over_pillow", "ffcv_over_decode", "dali_over_ffcv_own",
                  "dali_over_pillow", "dali_over_decode"],
    "simclr": ["ffcv_over_pillow", "ffcv_over_decode", "dali_over_pillow", "dali_over_decode"],
    "checksum": ["ffcv_over_ffcv_unverified", "dali_over_dali_unverified"],
    "cost": ["whole_ms", "decode_ms", "resize_ms", "colour_ms", "blur_ms", "normalise_ms", "rest_ms"],
    "resize": ["psnr_db", "psnr_db_1_percent", "psnr_db_least"],
    "open": ["ffcv_seconds", "ffcv_megabytes", "ffcv_process_megabytes", "dali_seconds", "dali_megabytes",
             "dali_process_megabytes", "format_1_seconds"],
}  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("bench"), images=16, batch=16)


def test_every_part_can_be_chosen_and_has_both_scales():
    assert set(PARTS) == set(FULL) == set(SMALL) == set(FIGURES)


@pytest.mark.parametrize(
    "part", ["open", *(pytest.param(part, marks=pytest.mark.soak) for part in PARTS if part != "open")]
)
def test_a_part_is_measured_in_a_process_of_its_own_and_leaves_nothing(tmp_path, part):
    words = ["bench", "loader", "--scale", "small", "--part", part, "--json", "--dir", str(tmp_path)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["parts"][part]
    assert list(found["figures"]) == FIGURES[part]
    assert all(figure["ours"] >= 0 and figure["held"] is None for figure in found["figures"].values())
    assert list(tmp_path.iterdir()) == []


def test_what_is_asked_of_the_loaders():
    asked = {case: {(ours, other): least for (ours, other), least in CASES[case].asked.items()} for case in CASES}
    assert asked == {
        "single": {(FFCV, FFCV_OWN): 1.2, (FFCV, PILLOW): 2.5, ("dali", PILLOW): 1.2},
        "two_views": {(FFCV, FFCV_OWN): 2.0},
        "simclr": {(FFCV, PILLOW): 3.0},
        "checksum": {(FFCV, "ffcv_unverified"): 0.98, ("dali", "dali_unverified"): 0.98},
    }
    assert all(set(of_case) <= set(CASES[case].pairs) for case, of_case in asked.items())


@pytest.mark.parametrize("recipe", ["crop_flip", "simclr"])
def test_pillow_makes_the_views_that_our_loader_makes(material, recipe):
    """Colours are jittered by other factors: there the crops are compared where neither was."""
    ids = np.arange(material.dataset.n)
    views = PillowViews(material.files, recipe, 2, 64).__getitems__([(3, int(sample_id)) for sample_id in ids])
    with FFCVLoader.open(material.dataset, material.order, recipe=RECIPES[recipe], image_size=64, views=2) as loader:
        batch = loader.make(ids, 3)
    std = np.array(RECIPES[recipe].std, np.float32).reshape(1, 3, 1, 1)
    for view in range(2):
        theirs = np.stack([views_of_sample[view].numpy() for views_of_sample in views])
        decibels = psnr(255 * std * theirs, 255 * std * batch.views[view].numpy())
        assert (decibels > 36).all() if recipe == "crop_flip" else theirs.shape == (len(ids), 3, 64, 64)


def test_the_limit_decodes_every_row(material):
    assert decode_rows(material.dataset.shard(0), np.arange(material.dataset.n)) == 0


def test_a_round_is_as_many_batches_as_its_sizes_say(material):
    sizes = replace(SMALL["single"], warm_up=2, batches=3)
    with decode_only(material, CASES["single"], sizes) as serve:
        assert len(list(serve(0))) == 5
        assert images_per_second(serve, sizes, 1) > 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_how_each_contender_was_opened_is_told(case):
    told = [line.split(":")[0] for line in configured(case)]
    assert told == [NAMES[name] for name in case.contenders]


def test_psnr_of_a_difference_of_one_level_everywhere():
    views = np.full((2, 3, 4, 4), 7, np.float32)
    assert psnr(views, views + 1) == pytest.approx([48.13] * 2, abs=0.01)
    assert psnr(views, views) == pytest.approx([99] * 2)


def test_a_part_that_there_is_not_is_wrong_usage():
    done = CliRunner().invoke(main, ["bench", "loader", "--part", "three_views"])
    assert done.exit_code == 2
    assert "'three_views' is not one of 'single'" in done.stderr
