"""Margins of pairs by their features, against plain numpy."""

import numpy as np
import pytest

from thermopile.tools.inspection.features import neighbours as module
from thermopile.tools.inspection.features.features_file import FEATURE_ROWS_AT_ONCE
from thermopile.tools.inspection.features.neighbours import margins

from support.features import stored

N = FEATURE_ROWS_AT_ONCE + 200


@pytest.fixture
def features(tmp_path):
    return stored(tmp_path, np.random.default_rng(1).normal(size=(N, 2, 8)))


def plain_margins(features, negatives):
    pictures, captions = features.rows(np.arange(features.samples)).transpose(1, 0, 2)
    cosine = pictures @ captions.T
    others = cosine + np.where(np.eye(len(cosine)), -np.inf, 0)
    hardest = np.maximum(others[:, negatives].max(1), others[negatives].max(0))
    return cosine.diagonal() - hardest


def test_a_margin_is_the_pairs_cosine_minus_that_of_its_hardest_negative(features):
    np.testing.assert_allclose(margins(features), plain_margins(features, np.arange(N)), atol=1e-6)


def test_where_samples_are_many_all_are_compared_with_the_same_random_ones(features, monkeypatch):
    monkeypatch.setattr(module, "MAX_NEGATIVES", 300)
    drawn = np.random.default_rng(module._MARGIN_SEED).choice(N, 300, replace=False)
    done = []
    np.testing.assert_allclose(
        margins(features, lambda *at: done.append(at)), plain_margins(features, drawn), atol=1e-6
    )
    assert done == [(FEATURE_ROWS_AT_ONCE, N), (N, N)]
