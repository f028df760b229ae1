"""k-NN against a slow loop, its ties, and its weights."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional as F

from thermopile.trainer.evaluation import scoring
from thermopile.trainer.evaluation.evaluate import WEIGHTED
from thermopile.trainer.evaluation.scoring import Vote


def quiet(done, total):
    pass


def slow(train, labels, test, k):
    """The most frequent class among the k most similar, the first to appear among equals."""
    predicted = []
    for sample in test:
        order = sorted(range(len(train)), key=lambda j: -float(sample @ train[j]))[:k]
        votes = Counter(int(labels[j]) for j in order)  # in the order of first appearance
        predicted.append(max(votes, key=lambda label: votes[label]))
    return predicted


@given(seed=st.integers(0, 1 << 30), n=st.integers(3, 30), classes=st.integers(1, 5), k=st.integers(1, 3))
def test_the_most_frequent_class_of_the_nearest_wins(seed, n, classes, k):
    generator = torch.Generator().manual_seed(seed)
    train, test = (F.normalize(torch.randn(m, 4, generator=generator, dtype=torch.float64)) for m in (n, 6))
    labels = torch.randint(classes, (n,), generator=generator)
    predicted = scoring.knn(train, labels, test, [*{Vote(k), Vote(n)}], quiet)
    assert predicted[Vote(k)].tolist() == slow(train, labels, test, k)
    assert predicted[Vote(n)].tolist() == slow(train, labels, test, n)


def test_of_equally_frequent_classes_the_nearest_sample_s_wins():
    angle = torch.tensor([0.5, 0.1, 0.2, 0.4, 0.6])
    train, labels = torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([0, 2, 1, 1, 0])
    test = torch.tensor([[1.0, 0.0]])
    # From the nearest on the classes are 2, 1, 1, 0, 0.
    found = scoring.knn(train, labels, test, [Vote(1), Vote(2), Vote(3), Vote(5)], quiet)
    assert {vote.k: predicted.item() for vote, predicted in found.items()} == {1: 2, 2: 2, 3: 1, 5: 1}


@pytest.mark.parametrize("k", [10, 20])
def test_weighted_votes_are_scikit_learns(k):
    generator = torch.Generator().manual_seed(2)
    train, test = (F.normalize(torch.randn(m, 6, generator=generator, dtype=torch.float64)) for m in (200, 90))
    labels = torch.randint(5, (200,), generator=generator)
    theirs = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    expected = theirs.fit(train.numpy(), labels.numpy()).predict(test.numpy())
    vote = Vote(k, WEIGHTED)
    assert scoring.knn(train, labels, test, [vote], quiet)[vote].tolist() == expected.tolist()


def test_a_weighted_vote_counts_exp_of_similarity_over_tau():
    similarity = torch.tensor([0.9, 0.8, 0.8, 0.1])
    train = torch.stack([similarity, (1 - similarity**2).sqrt()], 1)
    labels, test = torch.tensor([0, 1, 1, 2]), torch.tensor([[1.0, 0.0]])
    # Two neighbours less similar by 0.1 outweigh one where 2 exp(-0.1 / tau) > 1: for tau above 0.1 / log 2 = 0.144.
    votes = [Vote(4), Vote(4, 0.07), Vote(4, 0.14), Vote(4, 0.15), Vote(1, 0.15)]
    found = scoring.knn(train, labels, test, votes, quiet)
    assert [found[vote].item() for vote in votes] == [1, 0, 0, 1, 0]
    assert Vote(4).tau == math.inf


@pytest.mark.parametrize("held", [1, 45, 100])
def test_the_size_of_the_chunks_changes_nothing_but_the_progress(held, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    train, test = (F.normalize(torch.randn(m, 4, generator=generator)) for m in (20, 7))
    labels = torch.randint(3, (20,), generator=generator)
    whole = scoring.knn(train, labels, test, [Vote(5)], quiet)[Vote(5)]
    monkeypatch.setattr(scoring, "MAX_SIMILARITIES", held)
    done = []
    assert scoring.knn(train, labels, test, [Vote(5)], lambda *at: done.append(at))[Vote(5)].equal(whole)
    rows = max(1, held // 20)
    assert done == [(min(first + rows, 7), 7) for first in range(0, 7, rows)]
