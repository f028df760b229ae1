"""Retrieval ranks against a slow loop; several right entries; ties count against."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from thermopile.trainer.evaluation import scoring


def quiet(done, total):
    pass


def slow(queries, gallery, pairs):
    ranks = []
    for query in range(len(queries)):
        similarity = (gallery @ queries[query]).tolist()
        right = {entry for one, entry in pairs.T.tolist() if one == query}
        best = max(similarity[entry] for entry in right)
        ranks.append(sum(s >= best for entry, s in enumerate(similarity) if entry not in right))
    return ranks


@given(seed=st.integers(0, 1 << 30), entries=st.integers(1, 25), more=st.integers(0, 20), held=st.integers(1, 60))
def test_the_rank_is_the_number_of_wrong_entries_before_the_first_right_one(seed, entries, more, held):
    generator = torch.Generator().manual_seed(seed)
    query = torch.cat([torch.arange(7), torch.randint(7, (more,), generator=generator)])
    pairs = torch.stack([query, torch.randint(entries, (7 + more,), generator=generator)])
    pairs = pairs[:, torch.randperm(7 + more, generator=generator)]
    queries, gallery = (F.normalize(torch.randn(m, 3, generator=generator, dtype=torch.float64)) for m in (7, entries))
    before, scoring.MAX_SIMILARITIES = scoring.MAX_SIMILARITIES, held
    try:
        assert scoring.retrieval_ranks(queries, gallery, pairs, quiet).tolist() == slow(queries, gallery, pairs)
    finally:
        scoring.MAX_SIMILARITIES = before


def test_a_caption_of_two_pictures_is_found_by_either():
    text = torch.tensor([[1.0, 0.0]])
    pictures = F.normalize(torch.tensor([[0.0, 1.0], [1.0, 0.1], [1.0, 1.0]]))
    assert scoring.retrieval_ranks(text, pictures, torch.tensor([[0, 0], [0, 1]]), quiet).tolist() == [0]
    assert scoring.retrieval_ranks(text, pictures, torch.tensor([[0], [0]]), quiet).tolist() == [2]


def test_features_that_are_all_the_same_find_nothing():
    same, pairs = F.normalize(torch.ones(5, 3)), torch.arange(5).repeat(2, 1)
    assert scoring.retrieval_ranks(same, same, pairs, quiet).tolist() == [4] * 5
