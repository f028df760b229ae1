"""Files of features that no encoder made, and features of samples in memory."""

import numpy as np
import torch

from thermopile.tools.inspection.features.features_file import NAME, FeaturesFile, FeaturesOf, write_features
from thermopile.trainer.evaluation.features import some_features


def stored(folder, rows, digest="0" * 64):
    """Write features, [n, d] of pictures alone or [n, sides, d]; return the opened file. Rows are given norm 1."""
    rows = rows[:, None] if rows.ndim == 2 else rows
    norm = np.linalg.norm(rows, axis=2, keepdims=True)
    unit = (rows / np.where(abs(norm - 1) < 1e-3, 1, norm)).astype(np.float32)  # rounded ones stay as they are
    of = FeaturesOf(samples=len(rows), checkpoint="step-5", weights="raw", digest=digest)
    write_features(folder / NAME, of, iter([unit]))
    return FeaturesFile(folder / NAME, of)


def sample_features(encoders, dataset, ids, *view, views=0):
    """The features of samples, a tensor a side; arguments as for `some_features`."""
    return [torch.cat(side) for side in zip(*some_features(encoders, dataset, ids, *view, views=views), strict=True)]
