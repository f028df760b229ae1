"""Planted captions: who shows whose is a function of seed, id and captions alone, and loaders obey it."""

import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.dataset.samples_table import CAPTION, CAPTIONS
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset, Mixture
from thermopile.pipeline.order.order import Order, Served
from thermopile.pipeline.planted import MAX_DRAWS, NEAR, Planting
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.storage.bucket import Address
from thermopile.storage.selection import IDS, WITHOUT, Selection, SelectionWriter
from thermopile.trainer.run.build import windows_from

from support.conversions import append_glyphs
from support.datasets import captions_of
from support.loaders import WHOLE
from support.mixtures import made_parts
from support.pictures import as_bytes, draw
from support.remote_reading import loader_named

SHARE = 0.2


def tokens_by_id(dataset, planting, order=None, *, epoch=0, name="ffcv", captions="draw"):
    """Sample id -> the tokens that a loader serves."""
    order = order or Order.create(dataset.n, 64, 0)
    more = {"recipe": WHOLE, "image_size": 16, "views": 1, "planting": planting, "captions": captions}
    with loader_named(name)(dataset, order, **more) as loader:
        served = [(batch.sample_ids.tolist(), batch.tokens) for batch in loader.epoch(epoch)]
    return {id: tokens for ids, of_batch in served for id, tokens in zip(ids, of_batch, strict=True)}


def assert_served(dataset, planting, order=None, **more):
    """Assert that planted samples are served with their donors' captions, and all others with their own."""
    own = dict(enumerate(all_tokens(dataset)))
    whose = dict(zip(*(each.tolist() for each in planting.all()), strict=True))
    served = tokens_by_id(dataset, planting, order, **more)
    assert len(served.keys() & whose.keys()) > 20
    for id, tokens in served.items():
        np.testing.assert_array_equal(tokens, own[whose.get(id, id)])
        assert id not in whose or not np.array_equal(tokens, own[id])


def all_tokens(dataset):
    shards = [dataset.shard(number) for number in range(dataset.shards)]
    return np.concatenate([shard.tokens(np.arange(len(shard))) for shard in shards])


def selection(folder, dataset, ids=None, without=None):
    with SelectionWriter(folder, dataset.n) as writer:
        for name, numbers in ((IDS, ids), (WITHOUT, without)):
            if numbers is not None:
                writer.add(name, [numbers])
        writer.finish()
    return Selection(folder)


@pytest.mark.parametrize("name", ["ffcv", pytest.param("dali", marks=pytest.mark.wide)])
def test_a_planted_sample_is_served_with_another_ones_caption_and_all_others_with_their_own(pairs_dataset, name):
    assert_served(pairs_dataset, Planting(pairs_dataset, 5, SHARE), name=name)


def test_nothing_is_planted_by_a_loader_that_is_not_told_to(pairs_dataset):
    for id, tokens in tokens_by_id(pairs_dataset, None).items():
        np.testing.assert_array_equal(tokens, pairs_dataset.shard(0).tokens(np.array([id]))[0])


def test_as_many_are_planted_as_asked_and_others_with_another_seed(noise_dataset):
    found = [Planting(noise_dataset, seed, SHARE).all()[0] for seed in (1, 2)]
    assert [len(ids) for ids in found] == pytest.approx([SHARE * 4096] * 2, rel=0.1)
    assert len(np.intersect1d(*found)) == pytest.approx(SHARE**2 * 4096, rel=0.25)


def test_any_part_of_the_ids_in_any_order_gives_the_same(noise_dataset):
    planting = Planting(noise_dataset, 1, SHARE)
    whole = dict(zip(*(each.tolist() for each in planting.all()), strict=True))
    ids = np.random.default_rng(0).permutation(4096)[:700]
    places, donors = planting.of(ids)
    assert dict(zip(ids[places].tolist(), donors.tolist(), strict=True)) == {
        id: whole[id] for id in ids.tolist() if id in whole
    }


def test_captions_come_from_the_samples_around_in_the_same_shard(noise_dataset):
    ids, donors = Planting(noise_dataset, 1, SHARE).all()
    assert (abs(ids - donors) <= NEAR).all()
    np.testing.assert_array_equal(noise_dataset.locate(ids)[0], noise_dataset.locate(donors)[0])
    assert len(np.unique(donors)) > 0.8 * len(donors)


def pairs_of(folder, captions):
    """A dataset of one picture with each of these captions, or lists of captions."""
    pictures = [as_bytes(draw(0), "JPEG")] * len(captions)
    pq.write_table(pa.table({"image": pictures, "caption": captions}), folder / "p.parquet")
    convert(ParquetSource([folder / "p.parquet"]), folder / "pairs", ConvertSettings(), workers=1)
    return Dataset(folder / "pairs")


def test_a_draw_that_gives_an_equal_caption_is_made_again(tmp_path):
    dataset = pairs_of(tmp_path, ["a picture" if number % 20 else f"thing {number}" for number in range(400)])
    captions = dataset.column(CAPTION).to_pylist()
    ids, donors = Planting(dataset, 0, 0.5).all()
    assert all(captions[id] != captions[donor] for id, donor in zip(ids, donors, strict=True))
    # 19 of 20 draws are equal for most: after MAX_DRAWS of them 0.95^64 keep their own.
    assert len(ids) == pytest.approx(200 * (1 - 0.95**MAX_DRAWS), rel=0.15)


def test_where_all_captions_are_equal_none_is_planted(tmp_path):
    assert len(Planting(pairs_of(tmp_path, ["one"] * 40), 0, 0.5).all()[0]) == 0


@pytest.mark.parametrize("captions", ["draw", "first"])
def test_of_several_captions_one_of_the_donors_is_drawn_in_every_epoch(captions_dataset, captions):
    planting = Planting(captions_dataset, 0, SHARE)
    own = {id: captions_dataset.shard(0).tokens_of(id) for id in range(captions_dataset.n)}
    keys = captions_dataset.column("key").to_pylist()
    planted, met = dict(zip(*(each.tolist() for each in planting.all()), strict=True)), Counter()
    for epoch in range(6):
        for id, tokens in tokens_by_id(captions_dataset, planting, epoch=epoch, captions=captions).items():
            of_donor = own[planted.get(id, id)]
            (place,) = np.flatnonzero((of_donor == tokens.numpy()).all(1))
            met[place] += 1
    assert all(captions_of(int(keys[id])) != captions_of(int(keys[donor])) for id, donor in planted.items())
    assert set(met) == ({0, 1, 2, 3, 4} if captions == "draw" else {0})


def test_a_sample_that_shares_one_of_several_captions_gives_none(tmp_path):
    captions = [["a thing", f"thing {number}"] for number in range(30)] + [["another", "one more"]] * 2
    dataset = pairs_of(tmp_path, captions)
    ids, donors = Planting(dataset, 0, 0.5).all()
    texts = dataset.column(CAPTIONS).to_pylist()
    assert len(ids) > 8
    assert all(set(texts[id]).isdisjoint(texts[donor]) for id, donor in zip(ids, donors, strict=True))


@pytest.mark.wide
def test_what_is_planted_stays_planted_when_samples_are_appended(pairs_dataset, tmp_path):
    grown = shutil.copytree(pairs_dataset.path, tmp_path / "grown")
    append_glyphs(grown, np.arange(0, 10_847, 20))
    before, after = (Planting(dataset, 3, SHARE).all() for dataset in (pairs_dataset, Dataset(grown)))
    assert [numbers[: len(before[0])].tolist() for numbers in after] == [numbers.tolist() for numbers in before]
    new = after[0][len(before[0]) :]
    assert new.min() >= 2_000
    assert len(new) == pytest.approx(SHARE * 543, rel=0.3)


def test_parts_of_a_mixture_have_shares_of_their_own(pairs_dataset, tmp_path):
    mixture = Mixture(made_parts(pairs_dataset, tmp_path, 900, 400, 300))
    ids, donors = Planting(mixture, 1, (0.0, SHARE, 0.0)).all()
    assert len(ids) == pytest.approx(SHARE * 400, rel=0.3)
    assert all(900 <= id < 1_300 for id in (*ids, *donors))
    assert_served(mixture, Planting(mixture, 1, (0.0, 0.5, 0.0)), Order.create(1_600, 64, 0))


def test_samples_that_are_not_selected_or_left_out_give_no_caption(pairs_dataset, tmp_path):
    kept, gone = np.arange(0, 2_000, 2), np.arange(0, 1_000, 5)
    chosen = selection(tmp_path / "selection", pairs_dataset, kept, gone)
    planting = Planting(pairs_dataset, 1, SHARE, chosen)
    left = np.delete(kept, gone)
    ids, donors = planting.all()
    assert set(ids.tolist()) | set(donors.tolist()) <= set(left.tolist())
    assert len(ids) == pytest.approx(SHARE * len(left), rel=0.2)
    assert_served(pairs_dataset, planting, Served(Order.create(1_000, 64, 0), chosen, 2_000))


def test_a_sample_whose_donor_is_forgotten_gets_another_and_all_others_keep_theirs(pairs_dataset, tmp_path):
    before = Planting(pairs_dataset, 1, SHARE).all()
    gone = np.unique(before[1][:10])
    after = Planting(pairs_dataset, 1, SHARE, selection(tmp_path / "selection", pairs_dataset, without=gone)).all()
    kept = dict(zip(*(each.tolist() for each in before), strict=True))
    for id, donor in zip(*(each.tolist() for each in after), strict=True):
        assert donor not in gone
        assert kept[id] in gone or donor == kept[id]


@pytest.mark.wide
def test_a_remote_dataset_with_little_room_serves_the_same(s3, noise_dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path / "cache"))
    remote = Dataset(uploaded(noise_dataset.path, Address("bucket", "planted")))
    order = Order.create(4096, 64, 0, 2, 16, 2)
    with remote.files.expect(windows_from(0, order, 1), order, 6_000_000):
        ours = tokens_by_id(remote, Planting(remote, 1, SHARE), order)
    theirs = tokens_by_id(noise_dataset, Planting(noise_dataset, 1, SHARE), order)
    assert ours.keys() == theirs.keys()
    for id, tokens in theirs.items():
        np.testing.assert_array_equal(ours[id], tokens)


def test_damaged_tokens_are_said_to_be_the_donors(pairs_dataset, tmp_path):
    broken = Dataset(shutil.copytree(pairs_dataset.path, tmp_path / "broken"))
    planting = Planting(broken, 1, SHARE)
    ids, donors = planting.all()
    with (broken.path / "shards" / "shard-00000.beton").open("r+b") as file:
        file.seek(int(broken.shard(0).records(donors[:1])["tokens_at"][0]))
        file.write(b"\xff\xff")
    order, more = Order.create(2_000, 64, 0), {"recipe": WHOLE, "image_size": 16, "views": 1, "planting": planting}
    with (
        FFCVLoader(broken, order, **more) as loader,
        pytest.raises(DatasetError, match=rf"sample {donors[0]} .*tokens"),
    ):
        loader.make(ids[:1], 0)
