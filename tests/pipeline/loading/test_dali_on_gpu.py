"""DALI on a GPU: what is read from its memory while it works on. What a CPU can show of it, it shows too."""

import itertools

import pytest
import torch

from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.views.recipes import RECIPES, Recipe

PLAIN = Recipe(mean=(0, 0, 0), std=(1, 1, 1))
DEVICES = [pytest.param("cpu", marks=pytest.mark.wide), pytest.param("cuda", marks=pytest.mark.gpu)]


def checksum(view):
    """An exact sum of the bits of a view, weighted by their places; int64, on the view's device."""
    bits = view.reshape(-1).view(torch.int32)
    return (bits * torch.arange(1, len(bits) + 1, device=view.device)).sum()


def keep_busy(device):
    """Let the device's current stream work for a while, some 30 ms, before what it is given next."""
    if device == "cuda":
        torch.cuda._sleep(50_000_000)


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES)
def test_pixels_stay_until_the_work_in_flight_on_a_dropped_batch_has_read_them(open_dali, pairs_dataset, device):
    # DALI works in memory of its own, which it reuses as soon as nothing in Python refers to it.
    loader = open_dali(pairs_dataset, recipe=RECIPES["simclr"], views=2, image_size=128, device=device)
    in_peace = []
    for step in range(10):
        batches = loader.epoch(0, step)
        batch = next(batches)
        batches.close()
        wait_for(device)
        in_peace.append([checksum(view).item() for view in batch.views])
    in_flight = []
    for batch, _ in zip(loader.epoch(0), range(10), strict=False):
        keep_busy(device)
        in_flight.append([checksum(view) for view in batch.views])
        del batch
    assert [[each.item() for each in sums] for sums in in_flight] == in_peace
    assert len({sums[0] for sums in in_peace}) == 10


def first_gradients(loader, device):
    """The gradients of a first layer's weights in a short contrastive training, and the pixels' standard deviation."""
    torch.manual_seed(0)
    first, last = torch.nn.Conv2d(3, 16, 5, stride=2).to(device), torch.nn.Linear(16, 16).to(device)
    optimiser = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    gradients, deviation = [], 0.0
    for batch, _ in zip(loader.epoch(0), range(4), strict=False):
        views = batch.to(torch.device(device)).views
        deviation = max(deviation, float(torch.stack(views).std()))
        one, other = (torch.nn.functional.normalize(last(first(view).relu().mean((2, 3)))) for view in views)
        loss = torch.nn.functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(one), device=device))
        optimiser.zero_grad()
        keep_busy(device)
        loss.backward()
        optimiser.step()
        gradients.append(first.weight.grad.clone())
        del batch, views, one, other, loss
    return [gradient.cpu() for gradient in gradients], deviation


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_layer_learns_as_from_the_ffcv_loader_on_the_same_ids(open_dali, pairs_dataset, device):
    loader = open_dali(pairs_dataset, views=2, image_size=64, device=device)
    options = {"recipe": PLAIN, "image_size": 64, "views": 2}
    with FFCVLoader(pairs_dataset, loader.order, **options) as ffcv:
        expected, deviation = first_gradients(ffcv, device)
    found, _ = first_gradients(loader, device)
    # The loaders' views differ by less than 1.5 levels of 255 in the mean (docs/figures_data.md). The gradient is a sum
    # over pixels times what comes back from the layers behind, and each of the two changes by no more than that share.
    tolerance = 2 * (1.5 / 255) / deviation
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < tolerance * other.norm()
    for one, other in itertools.permutations(expected, 2):  # another batch's pixels would show
        assert (one - other).norm() > 2 * tolerance * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_a_gpu_gives_the_ids_and_the_pixels_of_the_cpu_as_cuda_tensors(open_dali, pairs_dataset, name):
    recipe = RECIPES[name].model_copy(update={"mean": (0, 0, 0), "std": (1, 1, 1)})
    asked = {"recipe": recipe, "views": 2, "local_size": 16, "local_views": 2}
    loaders = [open_dali(pairs_dataset, device=device, **asked) for device in ("cpu", "cuda")]
    for one, other in zip(*(loader.epoch(0) for loader in loaders), strict=True):
        assert torch.equal(one.sample_ids, other.sample_ids)
        assert torch.equal(one.tokens, other.tokens)
        assert other.tokens.is_pinned()
        for first, second in zip((*one.views, *one.local), (*other.views, *other.local), strict=True):
            assert second.is_cuda
            assert 255 * (first - second.cpu()).abs().mean() < 1.5


@pytest.mark.gpu
def test_batches_of_a_gpu_are_ready_on_the_stream_that_asks_for_them_and_may_be_kept(open_dali, pairs_dataset):
    loader = open_dali(pairs_dataset, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        batches = loader.epoch(0)
        kept = next(batches)
        copy = kept.views[0].clone()
        for _ in batches:
            pass
        assert torch.equal(kept.views[0], copy)
