"""Which sample goes into which shard, known before a conversion starts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.pipeline.conversion import plan
from thermopile.pipeline.sources import Asked
from thermopile.pipeline.sources import shards as limits
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.sources.shards import listings, shard_count

sizes_of_chunks = st.lists(st.integers(0, 3000), min_size=1, max_size=30).filter(any)


def test_what_tells_a_changed_source_is_not_part_of_the_digest_that_datasets_record():
    made = plan.Plan.of(GlyphSource(0), plan.ConvertSettings(), Asked())
    other = made.model_copy(update={"marks": {"0.tar": "of another"}, "made_at": 0})
    assert other.digest() == made.digest()
    assert other.differences(made) == ["0.tar has changed"]
    assert made.differences(made.model_copy(update={"made_at": 0})) == []


def chunks_of(sizes):
    return np.cumsum([0, *sizes], dtype=np.int64)


@given(st.integers(1, 10**9))
def test_shards_are_of_one_size_and_never_too_large_to_convert(samples):
    shards = shard_count(samples, None)
    assert -(-samples // shards) <= limits.MAX_SHARD_ROWS
    if samples <= limits.MANY_SHARDS * limits.MAX_SHARD_ROWS:
        assert shards & (shards - 1) == 0
        assert shards <= limits.MANY_SHARDS


def test_small_datasets_are_cut_only_where_a_files_padding_is_little():
    assert shard_count(300, None) == 1
    assert shard_count(5_000, 200 << 20) == 4
    assert shard_count(50_000, 5 << 20) == 1  # tiny pictures
    assert shard_count(1_281_167, 140 << 30) == 128


@given(st.integers(1, 500), st.integers(1, 8), st.integers(0, 2**32))
def test_every_selected_sample_is_in_one_shard(samples, shards, seed):
    selected = np.arange(samples, dtype=np.int64) * 3
    parts = [*listings(3 * samples, selected, None, seed, shards)]
    assert len(parts) == shards
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), selected)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(sizes_of_chunks, st.integers(1, 6), st.integers(0, 2**32), st.data())
def test_every_selected_sample_of_a_chunked_source_is_in_one_shard(sizes, shards, seed, data):
    chunks = chunks_of(sizes)
    selected = np.flatnonzero(np.random.default_rng(seed).random(chunks[-1]) < data.draw(st.floats(0.3, 1)))
    if len(selected) < shards:
        return
    parts = [*listings(chunks[-1], selected, chunks, seed, shards)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), selected)


@given(sizes_of_chunks, st.integers(1, 6), st.integers(0, 2**32))
def test_the_samples_of_a_chunk_stay_near_each_other(sizes, shards, seed):
    chunks = chunks_of(sizes)
    for part in listings(chunks[-1], None, chunks, seed, shards):
        chunk = np.searchsorted(chunks, part, side="right")
        for number in np.unique(chunk):
            places = np.flatnonzero(chunk == number)
            assert np.ptp(places) < limits.WINDOW_ROWS + max(sizes)


def test_a_chunk_is_read_in_one_shard_and_its_samples_do_not_stand_in_its_order():
    chunks = chunks_of([500] * 40)
    parts = [*listings(20_000, None, chunks, 0, 4)]
    assert [len(part) for part in parts] == [5_000] * 4
    readers = [set(np.searchsorted(chunks, part, side="right").tolist()) for part in parts]
    assert sum(map(len, readers)) == 40
    neighbours = np.diff(np.searchsorted(chunks, parts[0], side="right"))
    assert (neighbours == 0).mean() < 0.4  # five chunks are mixed


def test_large_pictures_are_mixed_over_fewer_so_that_a_worker_can_hold_their_chunks():
    chunks = chunks_of([500] * 20)
    (part,) = listings(10_000, None, chunks, 0, 1, picture_bytes=1 << 20)
    chunk = np.searchsorted(chunks, part, side="right")
    assert max(np.ptp(np.flatnonzero(chunk == number)) for number in range(1, 21)) < 1_000


@pytest.mark.parametrize("chunks", [None, chunks_of([200] * 10)])
def test_the_seed_decides_the_order(chunks):
    first, again, other = (np.concatenate([*listings(2000, None, chunks, seed, 2)]) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
