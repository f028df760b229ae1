"""Retrieval ranks against a slow loop; several right entries; ties count against."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from thermopile.trainer.evaluation import scoring


def quiet(done, total):
    pass


def slow(queries, gallery, wanted, holds):
    ranks = []
    for query, label in zip(queries, wanted, strict=True):
        similarity = (gallery @ query).tolist()
        best = max(s for s, held in zip(similarity, holds, strict=True) if held == label)
        ranks.append(sum(s >= best for s, held in zip(similarity, holds, strict=True) if held != label))
    return ranks


@given(seed=st.integers(0, 1 << 30), captions=st.integers(1, 5), more=st.integers(0, 20), held=st.integers(1, 60))
def test_the_rank_is_the_number_of_wrong_entries_before_the_first_right_one(seed, captions, more, held):
    generator = torch.Generator().manual_seed(seed)
    holds = torch.cat([torch.arange(captions), torch.randint(captions, (more,), generator=generator)])
    wanted = torch.randint(captions, (7,), generator=generator)
    queries, gallery = (
        F.normalize(torch.randn(m, 3, generator=generator, dtype=torch.float64)) for m in (7, captions + more)
    )
    before, scoring.MAX_SIMILARITIES = scoring.MAX_SIMILARITIES, held
    try:
        assert scoring.retrieval_ranks(queries, gallery, wanted, holds, quiet).tolist() == slow(
            queries, gallery, wanted, holds
        )
    finally:
        scoring.MAX_SIMILARITIES = before


def test_a_caption_of_two_pictures_is_found_by_either():
    text = torch.tensor([[1.0, 0.0]])
    pictures = F.normalize(torch.tensor([[0.0, 1.0], [1.0, 0.1], [1.0, 1.0]]))
    wanted = torch.tensor([4])
    assert scoring.retrieval_ranks(text, pictures, wanted, torch.tensor([4, 4, 5]), quiet).tolist() == [0]
    assert scoring.retrieval_ranks(text, pictures, wanted, torch.tensor([4, 5, 5]), quiet).tolist() == [2]


def test_features_that_are_all_the_same_find_nothing():
    same, ids = F.normalize(torch.ones(5, 3)), torch.arange(5)
    assert scoring.retrieval_ranks(same, same, ids, ids, quiet).tolist() == [4] * 5
