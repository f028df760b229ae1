"""The methods that score features: k-NN, linear probes, retrieval and zero-shot. All settings are fixed, none tuned."""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_SIMILARITIES = 1 << 24
"""Similarities held at once: 64 MiB of float32, and a few times that for derived values."""

LBFGS_ITERATIONS = 1000
MOMENTUM, DROP = 0.9, 0.2


class Sgd(NamedTuple):
    """How a linear classifier is trained by SGD, with MOMENTUM and without weight decay."""

    epochs: int
    batch: int
    rate: float
    drops: tuple[int, ...] = ()
    """Epochs before which the rate is multiplied by DROP; without any it falls to 0 along a cosine, epoch by epoch."""
    nesterov: bool = False


ISOGCLR = Sgd(100, 256, 30.0, (40, 60, 80), nesterov=True)
"""iSogCLR (ICML 2023), linear evaluation. It does not state the momentum; 0.9 as in MoCo, the recipe's origin."""
MOCOV3 = Sgd(90, 1024, 0.4)
"""MoCo v3 (main_lincls.py), followed by AUC-CL and DeCL: a rate of 0.1 for 256 samples in a batch."""

TEMPLATES = ("a photo of a {}",)
PLACE = re.compile(r"\{(lower)?\}")
"""Placeholder for the class name: {} unchanged, {lower} in lower case, for tokenizers that distinguish case."""

OnCount = Callable[[int, int], None]
"""Called with the amount done and the total."""


class Vote(NamedTuple):
    """A vote of the k nearest samples with weights exp(similarity / tau), by default all 1."""

    k: int
    tau: float = math.inf


@torch.inference_mode()
def knn(train: Tensor, labels: Tensor, test: Tensor, votes: Sequence[Vote], on_progress: OnCount) -> dict[Vote, Tensor]:
    """For each vote, return the class with the most weight among a test sample's k nearest training samples, int64 [m].

    train, test: float32 [n, d] and [m, d], rows of norm 1; nearest means the highest inner product. labels: int64 [n],
    from 0. votes: distinct, each k 1 … n. A tie goes to the class with the nearest sample.
    Source of the weights: Wu et al., CVPR 2018, section 3.4.
    """
    predicted: dict[Vote, list[Tensor]] = {vote: [] for vote in votes}
    for chunk in _chunks(len(test), len(train)):
        similarity, nearest = (test[chunk] @ train.T).topk(max(vote.k for vote in votes))
        for vote in votes:
            neighbours, weights = labels[nearest[:, : vote.k]], (similarity[:, : vote.k] / vote.tau).exp()
            of_class = weights.new_zeros(len(neighbours), int(neighbours.max()) + 1)
            of_neighbour = of_class.scatter_add_(1, neighbours, weights).gather(1, neighbours)
            # argmax may return any of several maxima, so a weight that falls with the position marks the first.
            falling = torch.arange(neighbours.shape[1], 0, -1, device=neighbours.device)
            winner = ((of_neighbour == of_neighbour.amax(1, keepdim=True)) * falling).argmax(1, keepdim=True)
            predicted[vote].append(neighbours.gather(1, winner).squeeze(1))
        on_progress(chunk.stop, len(test))
    return {vote: torch.cat(parts) for vote, parts in predicted.items()}


def lbfgs_probe(train: Tensor, labels: Tensor, test: Tensor) -> tuple[Tensor, bool]:
    """Predict classes by scikit-learn's logistic regression (L2, C = 1) on standardised features.

    train, test: float32 [n, d] and [m, d]. labels: int64 [n], at least two distinct. Standardised by the training set's
    mean and standard deviation. Returns the classes, int64 [m] on the CPU, and whether the solver converged.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    model = LogisticRegression(max_iter=LBFGS_ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the caller is told
        model.fit(scaler.fit_transform(train.cpu().numpy()), labels.cpu().numpy())
    predicted = torch.from_numpy(model.predict(scaler.transform(test.cpu().numpy())))
    return predicted, int(model.n_iter_.max()) < LBFGS_ITERATIONS


def sgd_probe(
    train: Tensor | Callable[[int], Tensor], labels: Tensor, test: Tensor, on_progress: OnCount, how: Sgd = ISOGCLR
) -> Tensor:
    """Predict classes by a linear classifier, that of the last epoch: int64 [m].

    train: float32 [n, d], or a function that returns the features of an epoch, from 0. test: float32 [m, d]. ISOGCLR's
    high rate requires rows of norm 1. labels: int64 [n], from 0.
    """
    model = nn.Linear(test.shape[1], int(labels.max()) + 1, device=test.device)
    nn.init.zeros_(model.weight)  # the loss is convex: there is no symmetry to break
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), how.rate, MOMENTUM, nesterov=how.nesterov)
    schedule: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.epochs)
    if how.drops:
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(how.drops), DROP)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(how.epochs):
        features = train if isinstance(train, Tensor) else train(epoch)
        shuffled = torch.randperm(len(labels), generator=generator).to(labels.device)
        for first in range(0, len(labels), how.batch):
            rows = shuffled[first : first + how.batch]
            loss = F.cross_entropy(model(features[rows]), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        on_progress(epoch + 1, how.epochs)
    with torch.inference_mode():
        predicted: Tensor = model(test).argmax(1)
    return predicted


def few_shot(labels: Tensor, count: int, seed: int) -> Tensor:
    """Return the places of `count` random samples of each class, or all of a smaller one's; labels: int64 [n]."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    sizes = labels.bincount()
    starts = (sizes.cumsum(0) - sizes)[labels[by_class]]
    return by_class[torch.arange(len(labels), device=labels.device) - starts < count]


@torch.inference_mode()
def retrieval_ranks(queries: Tensor, gallery: Tensor, pairs: Tensor, on_progress: OnCount) -> Tensor:
    """Count wrong gallery entries ranked before each query's first right one, int64 [q]; 0 is a hit at 1.

    queries, gallery: float32 [q, d] and [g, d], rows of norm 1. pairs: int64 [2, p], each query and an entry that is
    right for it; every query has at least one. Ties count as wrong entries before, so constant features find nothing.
    """
    found = []
    for chunk in _chunks(len(queries), len(gallery)):
        similarity = queries[chunk] @ gallery.T
        query, entry = pairs[:, (pairs[0] >= chunk.start) & (pairs[0] < chunk.stop)]
        right = torch.zeros_like(similarity, dtype=torch.bool)
        right[query - chunk.start, entry] = True
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        found.append(((similarity >= best) & ~right).sum(1))
        on_progress(chunk.stop, len(queries))
    return torch.cat(found)


def _chunks(queries: int, gallery: int) -> Iterator[slice]:
    """Yield slices of the queries, in order; each has at most MAX_SIMILARITIES pairs, but at least one query."""
    rows = max(1, MAX_SIMILARITIES // max(1, gallery))
    return (slice(first, min(first + rows, queries)) for first in range(0, queries, rows))


@torch.inference_mode()
def zero_shot(images: Tensor, texts: Tensor, templates: int) -> Tensor:
    """Return the similarity of each image and each class, float32 [m, classes], without training samples.

    images: float32 [m, d]; texts: of `prompts`, float32 [classes * templates, d]; rows of norm 1. A class's feature is
    the normalised mean over the templates. Source: CLIP (Radford et al. 2021), section 3.1.4.
    """
    return images @ F.normalize(texts.view(-1, templates, texts.shape[1]).mean(1), dim=-1).T


def prompts(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Return every template filled with every name, ordered by name."""
    return [
        PLACE.sub(lambda place, name=name: name.lower() if place[1] else name, template)  # type: ignore[misc]
        for name in names
        for template in templates
    ]
