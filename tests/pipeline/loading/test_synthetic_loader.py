"""Random batches in place of a dataset's: of the same shapes, with the ids of the order."""

import numpy as np
import pytest
import torch

from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.loading.synthetic_loader import SyntheticLoader
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dataset", "views"), [("pairs_dataset", 1), ("images_dataset", 2)])
def test_random_batches_have_the_shapes_and_types_of_the_dataset_s_own(dataset, views, request):
    dataset = request.getfixturevalue(dataset)
    order, size = Order.create(dataset.n, 32), {"image_size": 16, "views": views, "local_size": 8, "local_views": 3}
    with FFCVLoader(dataset, order, recipe=RECIPES["clip"], **size) as loader:
        real = next(loader.epoch(0))
    with SyntheticLoader(dataset, order, device=CPU, **size) as loader:
        made = next(loader.epoch(0))
    assert torch.equal(made.sample_ids, real.sample_ids)
    assert [(view.shape, view.dtype) for view in made.views] == [(view.shape, view.dtype) for view in real.views]
    assert [(view.shape, view.dtype) for view in made.local] == [(view.shape, view.dtype) for view in real.local]
    if dataset.index.tokenizer is None:
        assert made.tokens is None
    else:
        assert (made.tokens.shape, made.tokens.dtype) == (real.tokens.shape, real.tokens.dtype)
        assert (made.tokens[:, -1] == dataset.index.tokenizer.end_id).all()
        assert made.tokens.max() < dataset.index.tokenizer.vocab_size


def test_random_batches_have_the_ids_of_a_rank_s_steps_from_any_step_of_any_epoch(images_dataset):
    order = Order.create(images_dataset.n, 32)
    with SyntheticLoader(images_dataset, order, image_size=8, views=2, device=CPU, rank=1, world=2) as loader:
        for epoch, first_step in ((0, 0), (3, 5)):
            coming = list(loader.epoch(epoch, first_step))
            assert len(coming) == order.steps_per_epoch - first_step
            for step, batch in enumerate(coming, first_step):
                np.testing.assert_array_equal(batch.sample_ids, order.batch_ids(epoch, step, 1, 2))
                assert len(batch.views[0]) == 16


def test_an_order_of_other_samples_is_refused(images_dataset):
    with pytest.raises(DatasetError, match="the order is for 64 samples"):
        SyntheticLoader(images_dataset, Order.create(64, 32), image_size=8, views=2, device=CPU)
