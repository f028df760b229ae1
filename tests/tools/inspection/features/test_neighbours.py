"""Neighbours and weights against sums written out over all samples."""

import numpy as np
import pytest

from thermopile.tools.inspection.features import neighbours as module
from thermopile.tools.inspection.features.neighbours import find_neighbours
from thermopile.trainer.errors import ConfigError

from support.features import stored

SAMPLES = 3000


@pytest.fixture(autouse=True, params=[1, 3], ids=["one thread", "three threads"])
def threads(request, monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: request.param)
    monkeypatch.setattr(module, "_SAMPLES_PER_THREAD", 100)


@pytest.fixture(scope="module")
def drawn():
    rows = np.random.default_rng(0).standard_normal((SAMPLES, 2, 8)).astype(np.float32)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float16).astype(np.float32)


@pytest.fixture(scope="module")
def pairs(drawn, tmp_path_factory):
    return stored(tmp_path_factory.mktemp("pairs"), drawn)


@pytest.fixture(scope="module")
def images(drawn, tmp_path_factory):
    return stored(tmp_path_factory.mktemp("images"), drawn[:, :1])


def others_by_similarity(similarity, sample_id):
    """All other ids, the most similar first, of ties the lowest first."""
    return [id for id in np.lexsort((np.arange(len(similarity)), -similarity)).tolist() if id != sample_id]


@pytest.mark.parametrize("sample_id", [0, 1023, 1024, SAMPLES - 1])
def test_nearest_pictures_and_captions_are_those_of_a_sort_of_all_others(pairs, drawn, sample_id):
    found = find_neighbours(pairs, sample_id, 10, {})
    for side, kind in enumerate(("pictures", "captions")):
        similarity = drawn[:, side] @ drawn[sample_id, side]
        ranking = found.nearest[kind]
        assert ranking.sample_ids.tolist() == others_by_similarity(similarity, sample_id)[:10]
        np.testing.assert_allclose(ranking.similarity, similarity[ranking.sample_ids], atol=1e-6)
        assert ranking.weights is None
    assert found.pair_similarity == pytest.approx(drawn[sample_id, 0] @ drawn[sample_id, 1], abs=1e-6)


@pytest.mark.parametrize("tau", [0.001, 0.05, 1.0])
def test_the_weights_of_negatives_are_the_softmax_at_the_temperature_of_the_side(pairs, drawn, tau):
    found = find_neighbours(pairs, 7, SAMPLES, {"image": tau, "text": 2 * tau})
    for side, own, other, temperature in (("image", 0, 1, tau), ("text", 1, 0, 2 * tau)):
        positive = drawn[7, 0] @ drawn[7, 1]
        h = (drawn[:, other] @ drawn[7, own]).astype(np.float64) - positive
        h = np.delete(h, 7) / temperature
        expected = np.exp(h - h.max()) / np.exp(h - h.max()).sum()
        ranking = found.negatives[side]
        by_id = np.insert(expected, 7, 0)
        # The similarities are float32: their last digit is 6e-8 / tau of the exponent.
        np.testing.assert_allclose(ranking.weights, by_id[ranking.sample_ids], rtol=1e-3, atol=1e-12)
        assert ranking.weights.sum() == pytest.approx(1, abs=1e-5)
        assert 7 not in ranking.sample_ids
        ranks, at_ranks = map(np.array, zip(*ranking.curve, strict=True))
        assert (ranks[0], ranks[-1], len(ranks) > 100, (np.diff(ranks) > 0).all()) == (1, SAMPLES - 1, True, True)
        np.testing.assert_allclose(at_ranks, np.sort(expected)[::-1][ranks - 1], rtol=1e-3, atol=1e-12)


def test_in_a_run_on_images_the_nearest_pictures_are_the_hardest_negatives(images, drawn):
    found = find_neighbours(images, 5, 4, {"sample": 0.1})
    assert found.nearest.keys() == {"pictures"}
    nearest, negatives = found.nearest["pictures"], found.negatives["sample"]
    assert nearest.sample_ids.tolist() == negatives.sample_ids.tolist()
    assert nearest.sample_ids.tolist() == others_by_similarity(drawn[:, 0] @ drawn[5, 0], 5)[:4]
    exponents = np.delete((drawn[:, 0] @ drawn[5, 0]).astype(np.float64), 5) / 0.1
    np.testing.assert_allclose(negatives.weights.sum(), np.sort(np.exp(exponents))[-4:].sum() / np.exp(exponents).sum(),
                               rtol=1e-4)  # fmt: skip
    assert found.pair_similarity is None


def test_of_ties_the_lowest_ids_come_first_across_blocks(tmp_path):
    same = np.zeros((2500, 1, 4), np.float32)
    same[:, :, 0] = 1
    found = find_neighbours(stored(tmp_path, same), 1, 3, {"sample": 0.05})
    assert found.nearest["pictures"].sample_ids.tolist() == [0, 2, 3]
    np.testing.assert_allclose(found.negatives["sample"].weights, 1 / 2499)


def test_with_fewer_others_than_asked_for_all_are_listed(tmp_path, drawn):
    found = find_neighbours(stored(tmp_path, drawn[:3]), 1, 10, {"image": 0.05})
    assert sorted(found.nearest["pictures"].sample_ids.tolist()) == [0, 2]
    assert found.negatives["image"].weights.sum() == pytest.approx(1)


def test_a_single_sample_has_no_neighbours(tmp_path, drawn):
    found = find_neighbours(stored(tmp_path, drawn[:1]), 0, 10, {"image": 0.05, "text": 0.05})
    assert [len(ranking.sample_ids) for ranking in (*found.nearest.values(), *found.negatives.values())] == [0] * 4


@pytest.mark.parametrize("tau", [None, 0.0, -1.0, np.nan, np.inf])
def test_without_a_usable_temperature_negatives_have_no_weights(pairs, tau):
    found = find_neighbours(pairs, 0, 3, {"image": tau})
    assert found.negatives["image"].weights is None
    assert len(found.negatives["image"].sample_ids) == 3


@pytest.mark.parametrize("sample_id", [-1, SAMPLES])
def test_an_unknown_id_is_refused_with_the_range_of_ids(pairs, sample_id):
    with pytest.raises(ConfigError, match=f"no such sample: {sample_id}; .* ids 0 … 2999"):
        find_neighbours(pairs, sample_id, 3, {})
