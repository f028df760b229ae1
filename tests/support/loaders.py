"""Recipes and batches of loaders."""

from thermopile.pipeline.views.recipes import Recipe

PLAIN = Recipe(mean=(0, 0, 0), std=(1, 1, 1))
"""A crop whose pixels lie in [0, 1]."""
WHOLE = PLAIN.model_copy(update={"scale": (1.0, 1.0), "ratio": (0.01, 100.0), "flip": 0.0})
"""Nearly the whole picture, unchanged but for the resize."""


def views_by_id(loader, epoch=0):
    """Sample id -> its views, local ones at the end."""
    return {
        int(sample_id): views
        for batch in loader.epoch(epoch)
        for sample_id, *views in zip(batch.sample_ids, *batch.views, *batch.local, strict=True)
    }
