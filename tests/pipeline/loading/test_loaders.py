"""What every loader must do: the order's ids, the pixels that belong to them, from any step, nothing left behind."""

import itertools
import os
import subprocess
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from thermopile.benchmarks.made import repeat_shard
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.views.recipes import RECIPES, view_parameters
from thermopile.storage.selection import WITHOUT, Selection, SelectionWriter

from support.conversions import dataset_of
from support.loaders import PLAIN, WHOLE, views_by_id
from support.programs import program

NOISY = WHOLE.model_copy(update={"local_scale": (1.0, 1.0), "noise": (10.0, 10.0)})
"""Views that differ in their noise alone."""


def source_index(dataset, sample_id):
    shard, row = (int(at[0]) for at in dataset.locate(np.array([sample_id])))
    return int(dataset.shard(shard).records(np.array([row]))["source_index"][0])


def pictures(view):
    """uint8-like levels [b, H, W, 3] of a view in [0, 1]."""
    return 255 * view.numpy().transpose(0, 2, 3, 1)


# Ids and pixels


def test_three_epochs_resumed_in_the_middle_serve_the_orders_ids_and_pixels(open_loader, photographs):
    root, dataset = photographs
    assert dataset.shards > 2
    loader = open_loader(dataset, recipe=WHOLE, image_size=64)
    steps = loader.order.steps_per_epoch
    broken_off = loader.epoch(1)
    served = list(loader.epoch(0))
    served += [next(broken_off), next(broken_off)]
    broken_off.close()
    served += [*loader.epoch(1, first_step=2), *loader.epoch(2)]
    expected = [loader.order.batch_ids(epoch, step) for epoch in range(3) for step in range(steps)]
    np.testing.assert_array_equal([batch.sample_ids.numpy() for batch in served], expected)
    for batch in served:
        for sample_id, picture in list(zip(batch.sample_ids.tolist(), pictures(batch.views[0]), strict=True))[::8]:
            source = Image.open(root / f"{source_index(dataset, sample_id):03d}.jpg").resize((64, 64), Image.BILINEAR)
            assert np.abs(picture - np.asarray(source)).mean() < 2  # another picture's would be about 70


def test_an_epoch_entered_in_the_middle_goes_on_as_if_never_left(open_loader, pairs_dataset):
    loader = open_loader(pairs_dataset, recipe=RECIPES["glyphs"], local_size=16, local_views=2)
    whole = list(loader.epoch(1))
    for one, other in zip(whole[-3:], loader.epoch(1, first_step=len(whole) - 3), strict=True):
        assert torch.equal(one.sample_ids, other.sample_ids)
        assert torch.equal(one.tokens, other.tokens)
        for view, again in zip((*one.views, *one.local), (*other.views, *other.local), strict=True):
            assert torch.equal(view, again)


def test_an_epoch_entered_at_its_end_is_empty(open_loader, pairs_dataset):
    loader = open_loader(pairs_dataset)
    assert list(loader.epoch(0, first_step=loader.order.steps_per_epoch)) == []


def test_ranks_share_out_the_batch_of_one_rank(open_loader, photographs):
    _, dataset = photographs
    alone = list(open_loader(dataset).epoch(0))
    ranks = [open_loader(dataset, rank=rank, world=2).epoch(0) for rank in range(2)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        ids = torch.cat([part.sample_ids for part in parts])
        assert len(ids.unique()) == len(ids)
        assert torch.equal(whole.sample_ids, ids)
        assert torch.equal(whole.views[0], torch.cat([part.views[0] for part in parts]))


def test_batches_with_holes_are_the_others_as_they_would_be_anyway(open_loader, pairs_dataset, tmp_path):
    with SelectionWriter(tmp_path / "selection", pairs_dataset.n) as writer:
        writer.add(WITHOUT, [np.arange(0, pairs_dataset.n, 3)])
        writer.finish()
    options = {"recipe": RECIPES["glyphs"], "local_size": 16, "local_views": 1, "batch_size": 250}
    whole, few = open_loader(pairs_dataset, **options), Selection(tmp_path / "selection")
    sizes = set()
    for batch, rest in zip(whole.epoch(0), open_loader(pairs_dataset, selection=few, **options).epoch(0), strict=True):
        present = batch.sample_ids % 3 > 0
        sizes.add(int(present.sum()))
        for values, left in zip((batch.sample_ids, batch.tokens, *batch.views, *batch.local),
                                (rest.sample_ids, rest.tokens, *rest.views, *rest.local), strict=True):  # fmt: skip
            assert torch.equal(values[present], left)
    assert len(sizes) > 1


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory):
    """200 shards of 8 pairs: links to the files of one."""
    out = tmp_path_factory.mktemp("many") / "shards"
    dataset_of(GlyphSource(0), out, selection=np.arange(0, 320, 40))
    repeat_shard(out, 200)
    return out


@pytest.mark.wide
def test_batches_of_more_shards_than_files_may_be_open_are_served(many_shards):
    limit = 160
    command = program("reading_many_shards", many_shards, limit)
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(int, done.stdout.split())) < limit


@pytest.mark.soak  # compiles all that loaders need, which takes most of a minute
def test_conversions_and_loaders_compile_what_they_share_for_the_same_types(photographs, tmp_path):
    # Twice the types would take a first start seconds more.
    cache = tmp_path / "cache"
    subprocess.run(program("converting_and_loading", photographs[0], tmp_path / "dataset"), check=True, timeout=220,
                   env=os.environ | {"NUMBA_CACHE_DIR": str(cache)})  # fmt: skip
    compiled = Counter(file.name.rpartition("-")[0] for file in cache.rglob("*-*"))
    shared = ["decode", "size_in_header", "checksum", "xxh64"]
    assert {name: compiled[name] for name in shared} == dict.fromkeys(shared, 1)


def test_tokens_belong_to_their_ids(open_loader, pairs_dataset):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pairs_dataset.tokenizer_path))
    batch = next(open_loader(pairs_dataset).epoch(2))
    assert batch.tokens.dtype == torch.int32
    captions = [row["caption"] for row in pairs_dataset.rows(batch.sample_ids.tolist())]
    assert tokenizer.decode_batch(batch.tokens.tolist()) == captions


def test_images_give_two_different_views_of_the_same_picture_and_no_tokens(open_loader, images_dataset):
    batch = next(open_loader(images_dataset, views=2, image_size=20).epoch(0))
    first, second = batch.views
    assert first.shape == second.shape == (32, 3, 20, 20)
    assert first.dtype == torch.float32
    assert batch.sample_ids.dtype == torch.int64
    assert batch.tokens is None
    assert not torch.equal(first, second)
    own = (first.mean((2, 3)) - second.mean((2, 3))).norm(dim=1).mean()
    other = (first.mean((2, 3)) - second.roll(1, 0).mean((2, 3))).norm(dim=1).mean()
    assert own < other


# Augmentation


@pytest.mark.parametrize(
    "other", [{"batch_size": 64, "workers": 3, "ahead": 4}, {"batch_size": 64, "rank": 1, "world": 2}]
)
@pytest.mark.parametrize("name", ["vicreg", "glyphs"])
def test_augmentation_of_a_sample_does_not_depend_on_batch_size_threads_or_ranks(
    open_loader, images_dataset, name, other
):
    settings = {"views": 2, "recipe": RECIPES[name], "local_size": 16, "local_views": 2}
    one = views_by_id(open_loader(images_dataset, workers=1, **settings))
    other = views_by_id(open_loader(images_dataset, **settings, **other))
    shared = one.keys() & other.keys()
    assert len(shared) > 100
    assert all(torch.equal(a, b) for i in shared for a, b in zip(one[i], other[i], strict=True))


@pytest.mark.parametrize("recipe", [PLAIN, NOISY])
def test_augmentation_differs_between_epochs_and_views(open_loader, images_dataset, recipe):
    loader = open_loader(images_dataset, views=2, recipe=recipe, local_size=32, local_views=2)
    one, other = views_by_id(loader, 0), views_by_id(loader, 1)
    for i in one.keys() & other.keys():
        assert not any(torch.equal(*two) for two in itertools.combinations([*one[i], *other[i]], 2))


def test_local_views_are_smaller_crops_of_the_same_pictures_beside_the_others(open_loader, images_dataset):
    alone = next(open_loader(images_dataset, views=2).epoch(0))
    batch = next(open_loader(images_dataset, views=2, local_size=20, local_views=3).epoch(0))
    assert alone.local == ()
    assert [view.shape for view in batch.local] == [(32, 3, 20, 20)] * 3
    assert {view.dtype for view in batch.local} == {torch.float32}
    assert all(torch.equal(*two) for two in zip(alone.views, batch.views, strict=True))
    whole = next(open_loader(images_dataset, recipe=WHOLE).epoch(0)).views[0].mean((2, 3))
    for local in batch.local:
        own, other = ((local.mean((2, 3)) - means).norm(dim=1).mean() for means in (whole, whole.roll(1, 0)))
        assert own < other


@pytest.mark.parametrize("image_size", [48, 224])  # most crops are reduced, or enlarged
def test_a_view_is_the_crop_that_was_drawn_resized_as_pillow_does_and_mirrored(open_loader, photographs, image_size):
    root, dataset = photographs
    loader = open_loader(dataset, image_size=image_size, local_size=40, local_views=2)
    batch = next(loader.epoch(3))
    ids, sizes = batch.sample_ids.numpy(), np.array([[300], [400]]).repeat(len(batch.sample_ids), 1)
    for view, made in ((0, batch.views[0]), (2, batch.local[0]), (3, batch.local[1])):
        drawn = view_parameters(PLAIN, loader.order.seed, 3, ids, *sizes, view)
        assert 0 < drawn.flip.sum() < len(ids)
        for sample_id, picture, (top, left, height, width), flip in zip(
            ids, pictures(made), drawn.box.tolist(), drawn.flip, strict=True
        ):
            source = Image.open(root / f"{source_index(dataset, sample_id):03d}.jpg")
            box = (left, top, left + width, top + height)
            expected = np.asarray(source.resize(made.shape[2:], Image.BILINEAR, box=box), dtype=np.float32)
            expected = expected[:, ::-1] if flip else expected
            assert psnr(picture, expected) > 40


def psnr(one, other):
    return 10 * np.log10(255**2 / np.square(one - other).mean())


MIRRORED = {"mirrored glyphs": RECIPES["glyphs"].model_copy(update={"flip": 0.5})}


DAILY = {"simclr", *MIRRORED}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.wide) for name in (*RECIPES, *MIRRORED)]
)
def test_the_loaders_make_the_same_views(open_one, photographs, name):
    # FFCV decodes with libjpeg-turbo's fast transform, DALI with the exact one: one level of 255 apart, and 46 dB.
    # Where contrast or saturation is raised, so is that: up to 1.4 levels and 39 dB in one view. A crop that is off by
    # a pixel would be some 5 levels apart.
    _, dataset = photographs
    recipe = (RECIPES | MIRRORED)[name].model_copy(update={"mean": (0, 0, 0), "std": (1, 1, 1)})
    size = 32 if name == "simclr_cifar" else 128
    asked = {"views": 2, "image_size": size, "local_views": 2, "local_size": size // 2, "ahead": 0}
    one, other = (next(open_one(kind, dataset, recipe=recipe, **asked).epoch(1)) for kind in ("ffcv", "dali"))
    assert torch.equal(one.sample_ids, other.sample_ids)
    for first, second in zip((*one.views, *one.local), (*other.views, *other.local), strict=True):
        pairs = list(zip(pictures(first), pictures(second), strict=True))
        levels = [np.abs(a - b).mean() for a, b in pairs]
        decibels = [psnr(a, b) for a, b in pairs]
        assert np.mean(levels) < 1.5
        assert max(levels) < 3
        assert np.mean(decibels) > 44
        assert min(decibels) > 36
