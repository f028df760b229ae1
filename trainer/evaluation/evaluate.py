"""Evaluate a run's checkpoint on a training and a test set."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from ...pipeline.dataset.index import TOKENIZER_FILE, TokenizerInfo
from ...pipeline.dataset.samples_table import CAPTIONS
from ...pipeline.dataset.tokenizer import load_tokenizer
from ...pipeline.errors import DatasetError
from ...pipeline.opening import Dataset
from ...pipeline.views.recipes import Recipe
from ...storage.arrays import Bools, Int64s
from ...storage.files import sha256_of
from ...storage.selection import Selection, SelectionError
from ..checkpoints.checkpoint_files import LATEST
from ..config import DataConfig, Weights
from ..encoders import Encoders
from ..errors import ConfigError, RunError
from ..run.build import device_named, recipe_named
from ..run.own_dataset import kept_facts
from ..run.selection_files import check_own_copy
from ..run_directory import RunDirectory, find_checkpoint, load_found
from ..world import ALONE, World
from .bands import BANDS, NONE, Classes, Scores, band_of_class, half_widths, match_classes, score
from .features import image_features, restore_encoders, text_features
from .prompts import read_class_names
from .scoring import MOCOV3, TEMPLATES, Vote, few_shot, knn, lbfgs_probe, prompts, retrieval_ranks, sgd_probe, zero_shot

if TYPE_CHECKING:
    import pandas as pd

NEIGHBOURS = (10, 20, 100, 200)
WEIGHTED = 0.07
"""Temperature of weighted k-NN in Wu et al. (CVPR 2018)."""

Network = Literal["online", "momentum"]

OnProgress = Callable[[str, int, int], None]
"""Called with the name of the task, the amount done and the total."""


class Probes(NamedTuple):
    """Which linear probes to train besides those that need no choice."""

    shots: Sequence[int] = ()
    """Training samples a class of few-shot probes."""
    draws: int = 3
    """Of these samples; AUC-CL and DeCL have three."""
    augment: Recipe | None = None
    """Of the views of another probe, which take the encoder MOCOV3.epochs passes over the training set."""


@dataclass
class Evaluation:
    """The scores of one checkpoint. `notes` explain missing scores."""

    checkpoint: str
    train: Dataset
    test: Dataset
    classes: Classes
    scores: dict[str, dict[str, Scores]] = field(default_factory=dict)
    """By method and variant: knn (10, 20, …, 200_weighted), probe (lbfgs, sgd, sgd_90, sgd_90_views), few_shot (by
    samples a class), image_to_text and text_to_image (recall at 1, 5, 10), zero_shot (top1, 3, 5, mean_per_class)."""
    half_widths: dict[str, dict[str, Scores]] = field(default_factory=dict)
    """Of few_shot: half the 95 % interval of each score."""
    right: dict[tuple[str, str], tuple[Bools, Int64s]] = field(default_factory=dict)
    """By method and variant but few_shot and mean_per_class: what was right, bool [x], and of which test samples, int64
    [x]."""
    notes: list[str] = field(default_factory=list)
    weights: Weights = "raw"
    forgotten: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Ids of training samples that the run has left out: they count for classes and bands, but no method reads them."""

    @cached_property
    def neighbours(self) -> Int64s:
        """Ids of the training samples that k-NN and probes use, int64 [n], ascending."""
        return np.setdiff1d(np.flatnonzero(self.classes.train != NONE), self.forgotten, assume_unique=True)

    @cached_property
    def named(self) -> Classes:
        """The classes that zero-shot chooses from: the training set's if it has all of the test set's, or else these.

        None if the test set has no class, or if there is only one.
        """
        groups = self.test.column("group")
        named = match_classes(groups, groups) if self.classes.unknown else self.classes
        return named if len(named.names) > 1 and (named.test != NONE).any() else match_classes(groups[:0], groups[:0])

    def add(self, method: str, variant: object, right: Bools, of: Int64s) -> None:
        """Record what was right, bool [x], each for the test sample in `of`, int64 [x]."""
        self.right[method, str(variant)] = right, of
        self.scores.setdefault(method, {})[str(variant)] = score(right, self.classes.test_bands[of])

    def frame(self) -> "pd.DataFrame":
        """Return the scores, from 0 to 1, by method and variant, in columns `all`, `head`, `medium`, `tail`."""
        import pandas as pd  # late: only a notebook needs it

        rows = {(method, name): of for method, variants in self.scores.items() for name, of in variants.items()}
        return pd.DataFrame.from_dict(rows, orient="index")

    def _repr_html_(self) -> str:
        return str(self.frame().to_html(float_format="{:.1%}".format))

    @property
    def not_classified(self) -> str | None:
        """The reason for missing class scores, or None if there are scores."""
        for dataset, codes in ((self.train, self.classes.train), (self.test, self.classes.test)):
            if (codes == NONE).all():
                is_other = dataset is self.test and self.classes.unknown and self.classes.names
                return f"{dataset.place} has no class{f' of {self.train.place}' if is_other else 'es'}"
        return f"{self.train.place} has only one class" if len(self.classes.names) < 2 else None

    @property
    def classes_of_band(self) -> dict[str, int]:
        counts = np.bincount(band_of_class(self.classes.sizes), minlength=len(BANDS))
        return dict(zip(BANDS, counts.tolist(), strict=True))


def evaluate(
    run: RunDirectory,
    train: Dataset,
    test: Dataset,
    *,
    at: str = LATEST,
    network: Network = "online",
    weights: Weights | None = None,
    templates: Sequence[str] = TEMPLATES,
    classnames: str | None = None,
    allow_code: bool = False,
    probes: Probes | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Evaluation:
    """Evaluate a run's checkpoint, `latest` or step-N, by every method that its mode and the datasets allow.

    A unimodal run is scored on its backbone's features, before the projection head, which is discarded after training
    (SimCLR, section 2.1 and Figure 8; iSogCLR, section 6.1). A bimodal run is scored on the features after the heads,
    the space shared by images and texts, for all methods.
    The run's dataset may differ from both `train` and `test`. Nothing is fitted to or chosen
    by the test set.
    classnames: as read_class_names; None: the classes' own names, with blanks for underscores.
    network: the trained network, or the momentum network, which has only its own weights. weights: the trained
    network's, by default averaged if the run has averages. allow_code: as restore_encoders.
    Raises RunError if the run or checkpoint does not exist, DatasetError if the datasets do not fit the run,
    ConfigError as read_class_names, if no score is possible, if the run's encoders cannot be built or it has no
    momentum network or averaged weights; SelectionError if its copy of what it has forgotten is damaged or another's.
    """
    config = run.config()
    if network == "momentum":
        if weights == "averaged":
            raise ConfigError("a momentum network has no averaged weights; leave out --weights averaged or --network")
        weights = "raw"
    weights = config.model.chosen_weights(weights)
    checkpoint = find_checkpoint(run, at)
    result = compared(checkpoint.name, train, test)
    result.weights = weights
    names = read_class_names(classnames, result.named.names, (train, test)) if classnames else None
    info, training = load_found(checkpoint)
    tokenizer, sizes, _ = tokenizer_of(run) if config.objective.mode == "bimodal" else (None, None, None)
    if config.data.without and train.index.fingerprint == info.dataset_fingerprint:
        own = Selection(run.selection)
        if own.about.samples != train.n:
            of = f"{own.about.samples:,} samples"
            raise SelectionError(f"{own.folder} is of a dataset of {of}; restore the run's own")
        check_own_copy(config.data, own)
        result.forgotten = own.forgotten
        if not result.not_classified:
            gone = f"{len(result.forgotten):,} samples that {run.path} has forgotten"
            result.notes.append(f"k-NN and linear probe leave out {gone}.")
    encoders = restore_encoders(config, checkpoint, training, sizes, weights, allow_code=allow_code)
    if network == "momentum":
        if encoders.momentum is None:
            raise ConfigError(f"{run.path} has no momentum network (model.momentum is 0); score it without --network")
        encoders = Encoders(encoders.momentum)
    elif encoders.momentum is not None:
        result.notes.append("Scores of the trained network; --network momentum gives those of its moving average.")
    device = device_named("auto")  # a run trained on a GPU can be evaluated without a GPU
    given = encoders.to(device), config.data, device, tokenizer, templates
    score_encoders(result, *given, names, probes=probes, on_progress=on_progress)
    return result


def _also_in(train: Dataset, test: Dataset) -> int:
    """Return how many test pictures have the JPEG of a training sample.

    0 if that would take reading from a bucket, or a record is damaged, which may be of a sample that is forgotten.
    """
    if train.place.is_remote or test.place.is_remote:
        return 0
    with suppress(DatasetError):
        records = [[of.records(shard)["jpeg_checksum"] for shard in range(of.shards)] for of in (test, train)]
        of_test, of_train = map(np.concatenate, records)
        return int(np.isin(of_test, of_train).sum())
    return 0


def compared(checkpoint: str, train: Dataset, test: Dataset) -> Evaluation:
    """Return an evaluation without scores: the classes matched, and notes on problems with the datasets."""
    result = Evaluation(checkpoint, train, test, match_classes(train.column("group"), test.column("group")))
    sizes = result.classes.sizes
    if train.index.fingerprint == test.index.fingerprint:
        nearest = "" if result.not_classified else ", and every sample is its own nearest neighbour"
        result.notes.append(f"Training and test set are the same, so the scores say nothing of new samples{nearest}.")
    elif seen := _also_in(train, test):
        result.notes.append(
            f"{seen:,} of {test.n:,} test pictures are in the training set too, byte for byte: their scores say "
            "nothing of new samples."
        )
    if len(sizes) > 1 and (sizes == sizes[0]).all():
        result.notes.append(f"Every class has {sizes[0]:,} training samples, so the bands depend on class names only.")
    if (unknown := result.classes.unknown) and not result.not_classified:
        classes = f"{len(unknown):,} class{'es' * (len(unknown) != 1)}"
        result.notes.append(
            f"{sum(unknown.values()):,} of {test.n:,} test samples are left out of k-NN and linear probe: "
            f"the training set lacks their {classes}, such as {next(iter(unknown))!r}, by name."
        )
    if why := result.not_classified:
        lost = "k-NN and linear probe" if result.named.names else "k-NN, linear probe and zero-shot"
        result.notes.append(f"{why}, so there are no {lost} scores.")
    return result


def score_encoders(
    result: Evaluation,
    encoders: Encoders,
    data: DataConfig,
    device: torch.device,
    tokenizer: Tokenizer | None,
    templates: Sequence[str] = TEMPLATES,
    names: Sequence[str] | None = None,
    *,
    probes: Probes | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
    world: World = ALONE,
) -> None:
    """Add the scores of encoders, in evaluation mode and on `device`, to `result`.

    data: settings of the run, for its views. tokenizer: the run's own; None without a text encoder.
    names: of the classes in `result.named`, for prompts; None: their own, with blanks for underscores.
    probes: None: none. world: its ranks share the encoding, then the first scores; all call this.
    Raises ConfigError if no score is possible, DatasetError and RunError as image_features does.
    """
    scored = encoders.image if encoders.text is not None else encoders.image.backbone
    trained = recipe_named(data.recipe)

    def pictures(of: Dataset, what: str, ids: Int64s | None = None) -> Tensor:
        view = (trained, data.image_size, device)
        return image_features(scored, of, *view, partial(on_progress, what), world, ids, unit_norm=False)

    def views(recipe: Recipe, epoch: int) -> Tensor:
        view = (recipe.model_copy(update={"mean": trained.mean, "std": trained.std}), data.image_size, device)

        def show(done: int, total: int) -> None:
            on_progress("linear probe, augmented views", epoch * total + done, MOCOV3.epochs * total)

        ids = result.neighbours
        return image_features(scored, result.train, *view, show, sample_ids=ids, epoch=epoch, unit_norm=False)

    def texts(of: Sequence[str], what: str) -> Tensor | None:
        if encoders.text is None or tokenizer is None or not of:
            return None
        return text_features(encoders.text, tokenizer, of, device, partial(on_progress, what), world)

    captions = all_captions(result.test)
    is_classified = _has_classes(result, captions, encoders)
    test_images = pictures(result.test, "test pictures")
    train_images = pictures(result.train, "training pictures", result.neighbours) if is_classified else None
    caption_texts = texts(sorted({text for _, text in captions}), "captions")
    if encoders.text is not None and names is None:
        names = _own_names(result)
    prompt_texts = texts(prompts(names or (), templates), "prompts")
    if not world.is_first:
        return
    if train_images is not None:
        _classify(result, train_images, test_images, probes, views, on_progress)
    test_images = F.normalize(test_images, dim=-1)
    if encoders.text is None or tokenizer is None:
        result.notes.append("The run has no text encoder, so there are no retrieval and no zero-shot scores.")
        return
    _retrieve(result, test_images, captions, caption_texts, on_progress)
    if prompt_texts is not None:
        _name_classes(result, test_images, templates, prompt_texts)


def _has_classes(result: Evaluation, captions: Sequence[object], encoders: Encoders) -> bool:
    """Whether classes can be scored; a note says why not. Raises ConfigError if nothing else can be either."""
    lacking = result.not_classified
    if not lacking and len(np.unique(result.classes.train[result.neighbours])) < 2:
        lacking = "fewer than two classes are not forgotten"
        result.notes.append("Fewer than two classes are not forgotten, so there are no k-NN and linear probe scores.")
    if lacking and (encoders.text is None or not (captions or result.named.names)):
        why = "the run has no text encoder" if encoders.text is None else "it has no captions"
        raise ConfigError(f"{result.test.place} gives nothing to score: {lacking}, and {why}; choose other datasets")
    return not lacking


def _own_names(result: Evaluation) -> list[str]:
    """Return the classes' own names for prompts, with blanks for underscores; notes tell of names that need a look."""
    own = result.named.names
    if wnid := next((name for name in own if re.fullmatch(r"n\d{8}", name)), None):
        result.notes.append(f"Class names such as {wnid} say nothing to a text encoder; give --classnames FILE.")
    if joined := next((name for name in own if "_" in name), None):
        result.notes.append(f"Underscores in class names, as in {joined}, are blanks; --classnames group keeps them.")
    return [name.replace("_", " ") for name in own]


def tokenizer_of(run: RunDirectory) -> tuple[Tokenizer, TokenizerInfo, bytes]:
    """Load the run's own tokenizer, and its file. Raises RunError if it is missing or damaged, OSError."""
    known = kept_facts(run)
    if known and (sizes := known.tokenizer):
        with suppress(FileNotFoundError), run.path.on_this_machine([TOKENIZER_FILE]) as folder:
            path = folder / TOKENIZER_FILE
            if sha256_of(path) == known.tokenizer_digest:
                return load_tokenizer(path, context_length=sizes.context_length), sizes, path.read_bytes()
    lost = run.tokenizer if known else run.trained_on
    raise RunError(f"{lost} is missing or damaged; `thermopile train --resume --out {run.path}` writes it again")


def _classify(
    result: Evaluation,
    train: Tensor,
    test_images: Tensor,
    probes: Probes | None,
    views: Callable[[Recipe, int], Tensor],
    on_progress: OnProgress,
) -> None:
    """k-NN and probes on the features of `neighbours` and all test samples, float32 [n, d] and [m, d].

    views: returns features of augmented views of `neighbours` in an epoch.
    """
    labelled = np.flatnonzero(result.classes.test != NONE)
    test, truth = test_images[labelled], result.classes.test[labelled]
    norms = [features.norm(dim=1, keepdim=True).clamp_min(1e-12) for features in (train, test)]
    train.div_(norms[0])  # in place: the training set's features may be large
    test.div_(norms[1])
    labels = torch.from_numpy(result.classes.train[result.neighbours]).to(train.device)

    def add(method: str, variant: object, predicted: Tensor) -> None:
        result.add(method, variant, predicted.cpu().numpy() == truth, labelled)

    ks = [k for k in NEIGHBOURS if k <= len(train)]
    if left_out := [str(k) for k in NEIGHBOURS if k > len(train)]:
        result.notes.append(
            f"There is no k-NN for k = {', '.join(left_out)}: {len(train):,} training samples have a class"
            f"{' and are not forgotten' if len(result.forgotten) else ''}."
        )
    if ks:
        votes = [Vote(k, tau) for tau in (math.inf, WEIGHTED) for k in ks]
        for vote, predicted in knn(train, labels, test, votes, partial(on_progress, "k-NN")).items():
            add("knn", f"{vote.k}_weighted" if vote.tau == WEIGHTED else vote.k, predicted)
    if probes is None:
        return
    on_progress("linear probe, L-BFGS", 0, 1)
    predicted, converged = lbfgs_probe(train, labels, test)
    on_progress("linear probe, L-BFGS", 1, 1)
    add("probe", "lbfgs", predicted)
    add("probe", "sgd", sgd_probe(train, labels, test, partial(on_progress, "linear probe, SGD")))
    for shots in probes.shots:
        right = []
        for draw in range(probes.draws):
            few = few_shot(labels, shots, seed=draw)
            predicted, is_done = lbfgs_probe(train[few], labels[few], test)
            right.append(predicted.numpy() == truth)
            converged &= is_done
            on_progress(f"few-shot probes, {shots} a class", draw + 1, probes.draws)
        bands = result.classes.test_bands[labelled]
        result.scores.setdefault("few_shot", {})[str(shots)] = score(np.mean(right, axis=0), bands)
        result.half_widths.setdefault("few_shot", {})[str(shots)] = half_widths(np.array(right), bands)
        if fewer := int((labels.bincount() < shots).sum()):
            result.notes.append(f"Few-shot probes take all samples of {fewer:,} classes with fewer than {shots}.")
    if not converged:
        result.notes.append("A probe by L-BFGS had not converged when it reached its limit of iterations.")
    train.mul_(norms[0])
    test.mul_(norms[1])
    slow = partial(on_progress, "linear probe, SGD of 90 epochs")
    add("probe", "sgd_90", sgd_probe(train, labels, test, slow, MOCOV3))
    if probes.augment:
        shown = partial(views, probes.augment)
        add("probe", "sgd_90_views", sgd_probe(shown, labels, test, lambda done, total: None, MOCOV3))


def all_captions(dataset: Dataset) -> list[tuple[int, str]]:
    """Return all captions of a dataset, each with the id of its sample."""
    listed = dataset.column(CAPTIONS).to_pylist()
    return [(sample, text) for sample, texts in enumerate(listed) for text in texts or () if text is not None]


def _retrieve(
    result: Evaluation, images: Tensor, captions: list[tuple[int, str]], texts: Tensor | None, on_progress: OnProgress
) -> None:
    """Score retrieval between the m test images, float32 [m, d], and the distinct texts among all their captions.

    texts: features of the distinct ones, sorted, float32 [texts, d].
    An image is right to find any of its captions, and every caption is a query of its own, as on Flickr30k and COCO.
    """
    if texts is None:
        result.notes.append(f"{result.test.place} has no captions, so there are no retrieval scores.")
        return
    place = {text: code for code, text in enumerate(sorted({text for _, text in captions}))}
    of_caption = np.array([sample for sample, _ in captions])
    samples, picture = np.unique(of_caption, return_inverse=True)
    pairs = torch.from_numpy(np.stack([picture, [place[text] for _, text in captions]])).to(images.device)
    pictures = images[samples]
    to_text = retrieval_ranks(pictures, texts, pairs, partial(on_progress, "image to text"))
    to_image = retrieval_ranks(texts, pictures, pairs.flip(0), partial(on_progress, "text to image"))
    found = ("image_to_text", to_text, samples), ("text_to_image", to_image[pairs[1]], of_caption)
    for direction, ranks, of in found:
        for k in (1, 5, 10):
            result.add(direction, k, (ranks < k).cpu().numpy(), of)


def _name_classes(result: Evaluation, images: Tensor, templates: Sequence[str], texts: Tensor) -> None:
    """Score zero-shot classification of the m test images, float32 [m, d]; samples without a class do not count.

    texts: features of the prompts, float32 [classes * templates, d].
    """
    named = result.named
    labelled = np.flatnonzero(named.test != NONE)
    truth = named.test[labelled]
    similarity = zero_shot(images[labelled], texts, len(templates))
    right = similarity.argmax(1).cpu().numpy() == truth
    result.add("zero_shot", "top1", right, labelled)
    for k in (3, 5):
        if len(named.names) >= k:
            nearest = similarity.topk(k).indices.cpu().numpy()
            result.add("zero_shot", f"top{k}", (nearest == truth[:, None]).any(1), labelled)
    _, first, of = np.unique(truth, return_index=True, return_inverse=True)
    recall = np.bincount(of, right) / np.bincount(of)
    result.scores["zero_shot"]["mean_per_class"] = score(recall, result.classes.test_bands[labelled[first]])
