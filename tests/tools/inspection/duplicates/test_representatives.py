"""Who represents whom among near-duplicates: no chain makes one cluster, and a crowd is not many."""

import numpy as np
import pytest

from thermopile.tools.inspection.duplicates import similar_pairs as module
from thermopile.tools.inspection.duplicates.same_pictures import EDGE, agreement, prepare
from thermopile.tools.inspection.duplicates.similar_pairs import MAX_SIMILAR, NO_PAIRS, SimilarPairs, represent, star

from support.features import stored


def pairs_of(*ends):
    first, second = np.array(ends).T
    return SimilarPairs(first, second, np.ones(len(first), np.float32))


def refuse(pairs):
    return pairs.of(np.zeros(len(pairs.first), np.bool_))


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ([0, 0, 0, 0, 0], [0, 0, 2, 0, 4]),  # by ids: 2 is linked with 1 and 3, which 0 represents
        ([0, -1, 0, 0, 0], [1, 1, 1, 3, 4]),
        ([0, 1, 0, -1, 0], [3, 1, 3, 3, 4]),  # 1 is linked with 0 and 2 alone, which 3 represents
        ([np.inf, 1, np.nan, 0, 0], [3, 1, 3, 3, 4]),
    ],
)
def test_samples_join_the_first_representative_that_a_pair_links_them_with(tmp_path, score, expected):
    near = pairs_of((0, 1), (1, 2), (2, 3), (0, 3))
    found = represent(near, np.array(score, np.float32), stored(tmp_path, np.ones((5, 4))), refuse)
    assert found.tolist() == expected


@pytest.mark.wide
def test_members_of_a_chain_of_pictures_agree_with_their_representative(tmp_path):
    n, rng = 1000, np.random.default_rng(0)
    far = np.hypot(*(np.mgrid[:EDGE, :EDGE] - (EDGE - 1) / 2))
    rings = np.array([255 - 200 * np.exp(-((far - radius) ** 2) / 4) for radius in np.linspace(3, 12, n)])
    prepared = prepare(np.repeat(rings[:, None], 3, axis=1).astype(np.float32))
    angle = np.linspace(0, np.pi, n)
    features = stored(tmp_path, np.stack([np.cos(angle), np.sin(angle)], 1))

    def confirm(pairs):
        is_none = not len(pairs.first)
        return pairs if is_none else pairs.of(agreement(prepared[pairs.first], prepared[pairs.second]).same)

    near = confirm(pairs_of(*zip(range(n - 1), range(1, n), strict=True)))
    assert len(near.first) == n - 1, "no chain"
    found = represent(near, rng.standard_normal(n).astype(np.float32), features, confirm)
    assert (found[found] == found).all()
    members = np.flatnonzero(found != np.arange(n))
    ends = np.sort([members, found[members]], axis=0)
    assert agreement(prepared[ends[0]], prepared[ends[1]]).same.all()
    assert 5 < len(np.unique(found)) < 50


def test_a_crowd_in_which_each_has_few_candidates_is_one_cluster(tmp_path):
    n = 300
    near = pairs_of(*((i, i + k) for i in range(n) for k in range(1, MAX_SIMILAR + 1) if i + k < n))
    score = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    asked = []

    def confirm(pairs):
        asked.append(len(pairs.first))
        return pairs

    found = represent(near, score, stored(tmp_path, np.ones((n, 4))), confirm)
    assert (found == score.argmin()).all()
    assert max(asked) <= MAX_SIMILAR


def test_a_sample_is_compared_with_its_neighbours_most_similar_representatives(tmp_path):
    rows = np.array([[1, 0, 0], [1, 0.1, 0], [1, 0.2, 0], [0, 0, 1], [1, 0.2, 0]])
    asked = []

    def confirm(pairs):
        asked.append(pairs)
        return refuse(pairs)

    near = pairs_of((0, 3), (1, 3), (2, 3))
    represent(near, np.zeros(5, np.float32), stored(tmp_path, rows), confirm)
    assert [list(zip(p.first.tolist(), p.second.tolist(), strict=True)) for p in asked] == [[(0, 1)], [(1, 2), (0, 2)]]


def test_the_work_grows_with_the_samples_not_with_their_square(tmp_path, monkeypatch):
    n, compared, told = 400, [], []
    monkeypatch.setattr(module, "_REPRESENTATIVES", 3)
    monkeypatch.setattr(module, "most_similar", lambda features, id, others: compared.append(len(others)) or NO_PAIRS)
    score = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    near = pairs_of(*zip(range(n - 1), range(1, n), strict=True))
    found = represent(near, score, stored(tmp_path, np.ones((n, 4))), refuse, lambda *at: told.append(at))
    assert len(np.unique(found)) > n / 3, "most represent themselves"
    assert max(compared) <= 3 + 2  # those, and the representatives of its neighbours in the chain
    assert (told[0], told[-1]) == ((1, n), (n, n))


def test_the_lowest_score_represents_a_group_and_of_equal_ones_the_lowest_id():
    ids, group = np.array([7, 2, 5, 1, 9]), np.array([1, 1, 1, 4, 4])
    score = np.zeros(10, np.float32)
    score[5] = -1
    members, representatives = star(ids, group, score)
    assert dict(zip(members.tolist(), representatives.tolist(), strict=True)) == {2: 5, 7: 5, 9: 1}
