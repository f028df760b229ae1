"""Samples with several captions: the one that a loader serves in an epoch, and what a reader of the dataset finds."""

import shutil

import numpy as np
import pytest
import torch

from thermopile.pipeline.dataset.samples_table import CAPTIONS
from thermopile.pipeline.dataset.tokenizer import encode, load_tokenizer
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.ffcv_loader import ViewMaker
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.views.recipes import RECIPES

from support.datasets import captions_of


@pytest.fixture(scope="module")
def caption_of(captions_dataset):
    """Return a function (sample id, its tokens) -> number of that caption of the sample; it fails for another's."""
    length = captions_dataset.index.tokenizer.context_length
    tokenizer = load_tokenizer(captions_dataset.tokenizer_path, context_length=length)
    own = [
        [row.tobytes() for row in encode(tokenizer, captions_of(int(key))).tokens]
        for key in captions_dataset.column("key").to_pylist()
    ]
    return lambda sample_id, tokens: own[sample_id].index(tokens.numpy().tobytes())


def served(loader, epoch, caption_of):
    """Sample id -> number of the caption that it has in this epoch."""
    return {
        sample_id: caption_of(sample_id, tokens)
        for batch in loader.epoch(epoch)
        for sample_id, tokens in zip(batch.sample_ids.tolist(), batch.tokens, strict=True)
    }


def test_a_conversion_keeps_every_caption_with_its_tokens_and_counts_them(captions_dataset, caption_of):
    index, keys = captions_dataset.index, captions_dataset.column("key").to_pylist()
    expected = [captions_of(int(key)) for key in keys]
    both = captions_dataset.take(np.arange(512), [CAPTIONS, "caption"])
    assert both[CAPTIONS].to_pylist() == expected
    assert both["caption"].to_pylist() == [captions[0] for captions in expected]
    assert CAPTIONS not in captions_dataset.schema.names, "one text a sample, unless all are asked for"
    assert (index.captions_per_sample, index.captions) == (5, sum(map(len, expected)))
    for sample_id in range(0, 512, 7):
        tokens = torch.from_numpy(captions_dataset.shard(0).tokens_of(sample_id))
        assert [caption_of(sample_id, row) for row in tokens] == [*range(len(expected[sample_id]))]


def test_every_epoch_has_one_of_a_sample_s_captions_and_all_of_them_equally_often(
    open_loader, captions_dataset, caption_of
):
    loader, often = open_loader(captions_dataset), np.zeros(5)
    epochs = [served(loader, epoch, caption_of) for epoch in range(8)]
    assert epochs[0] != epochs[1]
    for of_sample in epochs:
        for sample_id, number in of_sample.items():
            if captions_dataset.shard(0).records(np.array([sample_id]))["captions"][0] == 5:
                often[number] += 1
    # 816 draws of five: 163 each, with a standard deviation of 11.
    assert abs(often / often.sum() - 0.2).max() < 0.06


@pytest.mark.parametrize("other", [{"batch_size": 64, "workers": 3, "ahead": 4}, {"rank": 1, "world": 2}])
def test_the_draw_depends_on_the_seed_and_not_on_batch_size_threads_or_ranks(
    open_loader, captions_dataset, caption_of, other
):
    alone = served(open_loader(captions_dataset), 3, caption_of)
    others = served(open_loader(captions_dataset, **other), 3, caption_of)
    assert others == {sample_id: alone[sample_id] for sample_id in others}
    assert served(open_loader(captions_dataset, seed=1), 3, caption_of) != alone


def test_an_epoch_entered_in_the_middle_draws_as_if_never_left(open_loader, captions_dataset):
    loader = open_loader(captions_dataset)
    whole = list(loader.epoch(1))
    for one, other in zip(whole[5:], loader.epoch(1, first_step=5), strict=True):
        assert torch.equal(one.tokens, other.tokens)


def test_the_first_caption_is_served_where_that_is_asked_for_and_outside_of_training(
    open_loader, captions_dataset, caption_of
):
    loader = open_loader(captions_dataset, captions="first")
    assert set(served(loader, 0, caption_of).values()) == {0}
    ids = np.arange(64)
    with ViewMaker(captions_dataset, recipe=RECIPES["clip"], image_size=16, views=1) as maker:
        np.testing.assert_array_equal(maker.make(ids, 4).tokens, captions_dataset.shard(0).tokens(ids))


def test_the_crop_does_not_depend_on_the_caption(open_loader, captions_dataset):
    drawn, first = (next(open_loader(captions_dataset, captions=captions).epoch(2)) for captions in ("draw", "first"))
    assert torch.equal(drawn.views[0], first.views[0])


def test_damage_to_any_caption_of_a_sample_is_found_whichever_is_read(open_loader, captions_dataset, tmp_path):
    copy = Dataset(shutil.copytree(captions_dataset.path, tmp_path / "copy"))
    sample_id = int(np.flatnonzero(copy.shard(0).records()["captions"] == 5)[0])
    (record,) = copy.shard(0).records(np.array([sample_id]))
    with (copy.path / "shards" / "shard-00000.beton").open("r+b") as file:
        file.seek(int(record["tokens_at"]) + 4 * copy.index.tokenizer.context_length * 4)  # the fifth caption's start
        file.write(b"\1\2\3\4")
    with pytest.raises(DatasetError, match=f"sample {sample_id} .* the checksum of its tokens does not match"):
        list(open_loader(copy, captions="first").epoch(0))
