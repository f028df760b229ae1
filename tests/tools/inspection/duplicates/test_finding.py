"""Duplicates of a dataset: exact copies by their bytes, near ones by their pixels, and the clusters of both."""

import shutil
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.tools.inspection.duplicates import same_pictures as same_module
from thermopile.tools.inspection.duplicates.finding import REASONS, find_duplicates, read_clusters, write_duplicates
from thermopile.tools.inspection.duplicates.same_pictures import blank_pictures, exact_copies
from thermopile.tools.inspection.duplicates.similar_pairs import MAX_SIMILAR, similar_pairs
from thermopile.tools.inspection.features.features_file import NAME
from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.opening import read_run
from thermopile.trainer.errors import ConfigError, RunError
from thermopile.trainer.run_directory import RunDirectory

from support.conversions import dataset_of
from support.features import stored
from support.pictures import draw, magnified

NO_SCORE = np.empty(0, np.float32)
PICTURES = 60
EXACT = {60: 3, 61: 3, 62: 7, 63: 61}
"""Key of a sample -> key of the sample whose file it repeats."""
NEAR = {64: 10, 65: 3, 66: 64}
"""Key -> key of the sample that it is a magnified part of."""


def duplicates_of(run):
    """Where a run's duplicates are written."""
    run.report.mkdir(parents=True, exist_ok=True)
    return run.report / "duplicates.parquet"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """60 pictures, four files that come again, and three that are magnified by 3 % and encoded again."""
    files, folder = {}, tmp_path_factory.mktemp("copies")
    for key in range(PICTURES):
        file = BytesIO()
        draw(key, 64, 64).save(file, "JPEG", quality=95)
        files[key] = file.getvalue()
    for key, original in EXACT.items():
        files[key] = files[original]
    for key, original in NEAR.items():
        file = BytesIO()
        magnified(Image.open(BytesIO(files[original])), 1.03).save(file, "JPEG", quality=70)
        files[key] = file.getvalue()
    table = pa.table({"image": list(files.values()), "key": [str(key) for key in files]})
    pq.write_table(table, folder / "pictures.parquet")
    return dataset_of(ParquetSource([folder / "pictures.parquet"]), folder / "data")


@pytest.fixture(scope="module")
def id_of(dataset):
    """Key -> sample id, by the order of the source."""
    index = np.concatenate([dataset.shard(number).records()["source_index"] for number in range(dataset.shards)])
    return {int(key): sample_id for sample_id, key in enumerate(index)}


@pytest.fixture
def features(dataset, id_of, tmp_path):
    """Features that hold every sample similar to every other, so that pixels decide."""
    return stored(tmp_path, 1 + 0.01 * np.random.default_rng(0).standard_normal((dataset.n, 8)))


def by_id(pairs, id_of):
    return {tuple(sorted((id_of[one], id_of[other]))) for one, other in pairs}


def test_exact_copies_name_the_first_sample_with_their_bytes(dataset, id_of):
    copies, originals = exact_copies(dataset)
    groups = [[3, 60, 61, 63], [7, 62]]
    expected = {}
    for group in groups:
        first, *others = sorted(id_of[key] for key in group)
        expected |= dict.fromkeys(others, first)
    assert dict(zip(copies.tolist(), originals.tolist(), strict=True)) == expected
    assert copies.tolist() == sorted(copies.tolist())


def test_equal_checksums_of_other_bytes_are_no_copies(dataset, monkeypatch):
    expected = [column.tolist() for column in exact_copies(dataset)]
    monkeypatch.setattr(same_module, "checksums", lambda asked, *_: np.zeros(asked.n, np.uint64))
    assert [column.tolist() for column in exact_copies(dataset)] == expected


def test_near_duplicates_are_the_similar_pairs_whose_pixels_agree(dataset, id_of, features, tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.tools.inspection.duplicates.similar_pairs.MAX_SIMILAR", dataset.n)
    found = find_duplicates(dataset, features, NO_SCORE, tmp_path)
    exact = {tuple(pair) for pair in np.stack(found.pairs[:2], 1)[found.reason == REASONS.index("exact")].tolist()}
    near = {tuple(pair) for pair in np.stack(found.pairs[:2], 1)[found.reason == REASONS.index("near")].tolist()}
    # Exact copies are left out of the near pairs: the first with these bytes stands for them.
    first = min(id_of[key] for key in (3, 60, 61, 63))
    assert near == by_id([(64, 10), (66, 64), (66, 10)], id_of) | {tuple(sorted((id_of[65], first)))}
    assert len(exact) == len(EXACT)
    assert np.isnan(found.pairs.similarity[found.reason == REASONS.index("exact")]).all()
    three = sorted(id_of[key] for key in (10, 64, 66))
    assert found.members([three[0]])[three[0]] == three
    assert found.sizes == {min(id_of[k] for k in group): len(group)
                           for group in ([3, 60, 61, 63, 65], [10, 64, 66], [7, 62])}  # fmt: skip


def test_pairs_are_written_with_reason_cluster_and_thresholds(dataset, features, tmp_path):
    found = find_duplicates(dataset, features, NO_SCORE, tmp_path)
    write_duplicates(tmp_path / "pairs.parquet", found, dataset.index.fingerprint)
    table = pq.read_table(tmp_path / "pairs.parquet")
    assert table.column_names == [
        "cluster", "first_id", "second_id", "reason", "similarity", "correlation", "difference",
    ]  # fmt: skip
    rows = table.to_pylist()
    assert sum(row["reason"] == "exact" for row in rows) == len(EXACT)
    for row in rows:
        assert row["first_id"] < row["second_id"]
        assert (row["similarity"] is None) == (row["reason"] == "exact")
    assert table.schema.metadata[b"thermopile.threshold.difference"] == b"1.9"
    assert table.schema.metadata[b"thermopile.dataset_fingerprint"].decode() == dataset.index.fingerprint


def test_without_duplicates_the_file_is_empty(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(same_module, "checksums", lambda asked, *_: np.arange(asked.n, dtype=np.uint64))
    found = find_duplicates(dataset, stored(tmp_path, np.eye(dataset.n)), NO_SCORE, tmp_path)
    write_duplicates(tmp_path / "pairs.parquet", found, dataset.index.fingerprint)
    assert (len(pq.read_table(tmp_path / "pairs.parquet")), found.sizes, found.members([])) == (0, {}, {})


def test_the_best_of_exact_copies_stands_for_them_and_is_first_in_its_cluster(dataset, id_of, features, tmp_path):
    score = np.zeros(dataset.n, np.float32)
    best = id_of[63]
    score[best] = -1
    found = find_duplicates(dataset, features, score, tmp_path)
    group = sorted(id_of[key] for key in (3, 60, 61, 65) if id_of[key] != best)
    assert found.members([best]) == {best: [best, *group]}
    is_exact = (found.reason == REASONS.index("exact")) & (found.cluster == best)
    assert is_exact.sum() == 3
    assert ((found.pairs.first == best) | (found.pairs.second == best))[is_exact].all()


def flat(colour, size=(48, 32)):
    return Image.new("RGB", size, colour)


def test_blank_pictures_are_one_group_whatever_their_colour_and_features(tmp_path):
    dotted, clear = flat("white", (96, 32)), Image.new("RGBA", (40, 40))
    dotted.paste("black", (0, 0, 6, 6))  # outside the central square
    faint = flat("white", (512, 512))
    faint.paste((235,) * 3, (246, 256, 266, 257))  # a line that a reduced picture does not show
    pictures = [flat("white"), draw(0, 64, 64), flat("white"), dotted, flat((200, 30, 0)), clear, dotted, faint]
    files = []
    for picture in pictures:
        file = BytesIO()
        picture.save(file, "PNG")
        files.append(file.getvalue())
    pq.write_table(pa.table({"image": files}), tmp_path / "pictures.parquet")
    dataset = dataset_of(ParquetSource([tmp_path / "pictures.parquet"]), tmp_path / "data")
    index = np.concatenate([dataset.shard(number).records()["source_index"] for number in range(dataset.shards)])
    blank = np.flatnonzero(np.isin(index, [0, 2, 4, 5]))
    assert blank_pictures(dataset).tolist() == blank.tolist()
    score = np.zeros(dataset.n, np.float32)
    score[blank[2]] = -1
    found = find_duplicates(dataset, stored(tmp_path, np.eye(dataset.n)), score, tmp_path)
    assert found.counts == {"exact": 1, "near": 0, "blank": 3}
    assert found.sizes == {blank[2]: 4, np.flatnonzero(np.isin(index, [3, 6]))[0]: 2}
    file = duplicates_of(run := RunDirectory(tmp_path / "run"))
    write_duplicates(file, found, dataset.index.fingerprint)
    rows = [row for row in pq.read_table(file).to_pylist() if row["reason"] == "blank"]
    assert {(row["similarity"], row["correlation"], row["difference"]) for row in rows} == {(None, None, None)}
    ids, of = read_clusters(run, dataset)
    assert ids[of == blank[2]].tolist() == blank.tolist()


def test_a_file_without_its_columns_is_refused_and_does_not_stop_an_inspection(hostile_run, tmp_path):
    run = type(hostile_run)(shutil.copytree(hostile_run.path, tmp_path / "run"))
    dataset = read_run(run).dataset
    pq.write_table(pa.table({"first_id": [1], "second_id": [2]}), duplicates_of(run))
    with pytest.raises(RunError, match=r"duplicates\.parquet cannot be used: .*cluster"):
        read_clusters(run, dataset)
    assert look(run.path).survey.samples == dataset.n


def test_a_file_of_more_pairs_than_are_to_be_read_is_refused(tmp_path, flat_dataset):
    file = duplicates_of(run := RunDirectory(tmp_path / "run"))
    pq.write_table(pa.table({"cluster": [0, 0], "first_id": [0, 0], "second_id": [1, 2]}), file)
    with pytest.raises(RunError, match="it has 2 pairs, more than 1"):
        read_clusters(run, flat_dataset, 1)


def drawn(samples=3000):
    """Features in groups of four similar samples each."""
    rng = np.random.default_rng(1)
    rows = np.repeat(rng.standard_normal((samples // 4, 32)), 4, axis=0)
    return rows + 0.1 * rng.standard_normal(rows.shape)


def all_pairs(found):
    return {pair for _, pairs in found for pair in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)}


def test_candidates_are_all_pairs_above_the_similarity_but_those_left_out(tmp_path):
    features, left_out = stored(tmp_path, drawn()), np.zeros(3000, np.bool_)
    left_out[::5] = True
    rows = np.concatenate([block[:, 0].copy() for _, block in features.blocks()])
    similarity = np.triu(rows @ rows.T, 1)
    similarity[left_out] = similarity[:, left_out] = 0
    expected = set(map(tuple, np.argwhere(similarity >= 0.9).tolist()))
    assert len(expected) > 1000
    assert all_pairs(similar_pairs(features, left_out, tmp_path)) == expected


def test_a_sample_has_its_most_similar_candidates_only(tmp_path):
    features = stored(tmp_path, np.ones((2000, 4)))
    found = all_pairs(similar_pairs(features, np.zeros(2000, np.bool_), tmp_path))
    assert {second for first, second in found if first == 7} == set(range(8, 8 + MAX_SIMILAR))
    assert len(found) <= 2000 * MAX_SIMILAR


def test_an_index_finds_the_candidates_of_a_large_run_and_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("faiss", reason="needs thermopile[neighbours]")
    features, nothing = stored(tmp_path, drawn()), np.zeros(3000, np.bool_)
    exact = all_pairs(similar_pairs(features, nothing, tmp_path))
    monkeypatch.setattr("thermopile.tools.inspection.duplicates.similar_pairs.EXACT_SAMPLES", 1000)
    found = all_pairs(similar_pairs(features, nothing, tmp_path))
    assert found <= exact
    assert len(found) >= 0.95 * len(exact)
    assert [*tmp_path.iterdir()] == [tmp_path / NAME]


def test_without_faiss_a_large_run_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    monkeypatch.setattr("thermopile.tools.inspection.duplicates.similar_pairs.EXACT_SAMPLES", 10)
    with pytest.raises(ConfigError, match=r"pip install 'thermopile\[neighbours\]'"):
        list(similar_pairs(stored(tmp_path, drawn(40)), np.zeros(40, np.bool_), tmp_path))
