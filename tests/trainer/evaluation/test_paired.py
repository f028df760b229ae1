"""How far two runs' scores are apart, and the errors: closed forms, a bootstrap, captions that samples share."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import t

from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.trainer.evaluation.bands import estimate, match_classes
from thermopile.trainer.evaluation.evaluate import Evaluation
from thermopile.trainer.evaluation.paired import caption_clusters, differences

from support.conversions import dataset_of
from support.pictures import draw


def of(values, clusters=None):
    values = np.atleast_2d(np.asarray(values, float))
    return estimate(values, np.arange(values.shape[1]) if clusters is None else np.asarray(clusters))


def test_one_seed_without_clusters_has_the_standard_error_of_a_mean():
    values = np.array([1.0, 0, 0, -1, 0, 1, 1, 0])
    found = of(values)
    assert found["mean"] == 0.25
    assert found["error"] == found["sample_error"] == pytest.approx(values.std(ddof=1) / np.sqrt(8))
    assert found["half_width"] == pytest.approx(t.ppf(0.975, 7) * found["error"])
    assert found["seed_error"] == 0


def test_clusters_have_the_error_that_drawing_them_again_and_again_shows():
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(300), rng.integers(1, 6, 300))
    values = rng.integers(-1, 2, 300)[clusters] * (rng.random(len(clusters)) < 0.7)
    draws = rng.integers(300, size=(4000, 300))
    sums, sizes = np.bincount(clusters, values), np.bincount(clusters)
    drawn = sums[draws].sum(1) / sizes[draws].sum(1)
    assert of(values, clusters)["error"] == pytest.approx(drawn.std(), rel=0.05)
    assert of(values)["error"] < 0.7 * drawn.std()  # as if none depended on another


@pytest.mark.parametrize("clusters", [2, 5, 10])
def test_the_interval_of_few_clusters_holds_the_truth_in_19_of_20_experiments(clusters):
    rng, each = np.random.default_rng(2), np.repeat(np.arange(clusters), 4)
    found = [of(rng.normal(0, 1, clusters)[each] + rng.normal(0, 0.3, len(each)), each) for _ in range(1000)]
    assert np.mean([abs(one["mean"]) <= one["half_width"] for one in found]) == pytest.approx(0.95, abs=0.02)


def test_seeds_that_differ_by_a_constant_have_students_error_of_their_means():
    seeds = np.array([0.01, 0.03, -0.02, 0.0])
    found = of(np.tile(seeds[:, None], (1, 50)))
    assert found["error"] == found["seed_error"] == pytest.approx(seeds.std(ddof=1) / 2)
    assert found["half_width"] == pytest.approx(t.ppf(0.975, 3) * found["error"])


@pytest.mark.parametrize(("of_seed", "of_cluster"), [(0.1, 1), (0, 0)])
def test_the_error_of_seeds_and_clusters_together_is_that_of_experiments_made_again(of_seed, of_cluster):
    rng, clusters, means, errors = np.random.default_rng(1), np.repeat(np.arange(60), 3), [], []
    for _ in range(500):
        of_clusters = rng.normal(0, of_cluster, 60)[clusters] + rng.normal(0, 0.5, (4, 60))[:, clusters]
        found = of(rng.normal(0, of_seed, (4, 1)) + of_clusters + rng.normal(0, 1, (4, 180)), clusters)
        means.append(found["mean"])
        errors.append(found["error"] ** 2)
    assert np.sqrt(np.mean(errors)) == pytest.approx(np.std(means), rel=0.08)


def test_samples_that_share_a_caption_are_one_cluster_also_through_others(tmp_path):
    captions = [["a", "b"], ["c"], ["f"], ["b", "d"], ["c", "c"], ["e"], ["g"], ["d"]]
    draw(0).save(tmp_path / "0.jpg")
    pictures = [(tmp_path / "0.jpg").read_bytes()] * len(captions)
    pq.write_table(pa.table({"image": pictures, "caption": captions}), tmp_path / "pairs.parquet")
    dataset = dataset_of(ParquetSource([tmp_path / "pairs.parquet"]), tmp_path / "pairs")
    clusters, keys = caption_clusters(dataset), np.array(dataset.column("key").to_pylist(), int)
    found = {tuple(sorted(keys[clusters == one].tolist())) for one in set(clusters.tolist())}
    assert found == {(0, 3, 7), (1, 4), (2,), (5,), (6,)}


@pytest.fixture(scope="module")
def few(pairs_dataset, tmp_path_factory):
    """400 glyphs of 20 classes, some of equal caption."""
    given = {"tokenizer_from": pairs_dataset.path / "tokenizer.json", "selection": np.arange(400)}
    return dataset_of(GlyphSource(0, test=True), tmp_path_factory.mktemp("few") / "few", **given)


def evaluation(dataset, rng, shift=0.0):
    """Scores of a made run: k-NN of the even samples, retrieval of all."""
    found = Evaluation("step-1", dataset, dataset, match_classes(dataset.column("group"), dataset.column("group")))
    for method, ids in (("knn", np.arange(0, 400, 2)), ("text_to_image", np.arange(400))):
        found.add(method, 10, rng.random(len(ids)) < 0.4 + shift, ids)
    return found


def test_a_run_is_not_apart_from_itself_but_unpaired_it_could_be(few):
    one = evaluation(few, np.random.default_rng(0))
    in_bands, by_class = differences([(one, one)])
    for found in (*in_bands["text_to_image"]["10"].values(), *by_class["knn"]["10"].values()):
        if found:
            assert (found["mean"], found["error"], found["half_width"], found["a"] - found["b"]) == (0, 0, 0, 0)
    assert in_bands["knn"]["10"]["all"]["unpaired_error"] > 0.03


def test_differences_are_those_of_the_scores_query_by_query_and_of_retrieval_within_captions(few):
    rng = np.random.default_rng(0)
    pairs = [(evaluation(few, rng), evaluation(few, rng, 0.3)) for _ in range(3)]
    in_bands, by_class = differences(pairs)
    captions, classes = caption_clusters(few), pairs[0][0].classes
    assert len(set(captions.tolist())) < 400
    every = ("knn", np.arange(0, 400, 2), np.arange(400)), ("text_to_image", np.arange(400), captions)
    for method, ids, clusters in every:  # pictures of one caption are each right or wrong in k-NN
        a, b = (np.array([pair[side].right[method, "10"][0] for pair in pairs], float) for side in (0, 1))
        for band, found in in_bands[method]["10"].items():
            for side, name in enumerate("ab"):
                scores = [pair[side].scores[method]["10"][band] for pair in pairs]
                assert found[name] == pytest.approx(np.mean(scores))
        whole, expected = in_bands[method]["10"]["all"], estimate(b - a, clusters[ids])
        assert {name: whole[name] for name in expected} == pytest.approx(expected)
        alone = [estimate(each, clusters[ids]) for each in (a, b)]
        for name in ("error", "half_width"):
            assert whole[f"unpaired_{name}"] == pytest.approx(np.hypot(*(one[name] for one in alone)))
        assert whole["queries"] == len(ids)
        members = classes.test[ids] == 3
        of_class = by_class[method]["10"][classes.names[3]]
        assert of_class["mean"] == pytest.approx((b - a)[:, members].mean())


def test_a_score_that_a_run_lacks_and_a_group_of_one_caption_have_no_difference(few):
    rng = np.random.default_rng(0)
    one, other = evaluation(few, rng), evaluation(few, rng)
    del other.right["knn", "10"]
    assert set(differences([(one, other)])[0]) == {"text_to_image"}
    one, other = evaluation(few, rng), evaluation(few, rng)
    for each in (one, other):
        each.right["text_to_image", "10"] = (np.array([True, False]), np.array([0, 0]))
    assert differences([(one, other)])[0]["text_to_image"]["10"]["all"] is None
