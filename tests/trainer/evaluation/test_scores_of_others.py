"""Scores as others report them, from features in slow loops: zero-shot, several captions, weighted neighbours."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.nn import functional as F

from thermopile.pipeline.dataset.tokenizer import load_tokenizer
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.trainer.config import DataConfig, ModelConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.evaluation import evaluate as evaluating
from thermopile.trainer.evaluation import scoring
from thermopile.trainer.evaluation.evaluate import compared, score_encoders
from thermopile.trainer.evaluation.features import image_features, text_features

from support.conversions import dataset_of

CPU = torch.device("cpu")
PROMPTS = ("the character {lower}", "a {}")


def quiet(*counted):
    pass


@pytest.fixture(scope="module")
def glyphs(pairs_dataset, tmp_path_factory):
    """Four of the 20 glyphs of each of 70 classes and two of each of the others: 340 pairs, many with one caption."""
    return dataset_of(
        GlyphSource(0, test=True),
        tmp_path_factory.mktemp("glyphs") / "pairs",
        selection=np.array([i for i in range(pairs_dataset.n) if i % 20 < (4 if i < 1400 else 2)]),
        tokenizer_from=pairs_dataset.path / "tokenizer.json",
    )


@pytest.fixture(scope="module")
def tokenizer(glyphs):
    return load_tokenizer(glyphs.tokenizer_path, context_length=glyphs.index.tokenizer.context_length)


@pytest.fixture(scope="module")
def encoders(glyphs):
    torch.manual_seed(0)
    config = ModelConfig(dim=8, image={"name": "conv", "config": {"width": 4}}, text={"name": "mean_embedding"})
    return Encoders.create(config, "bimodal", 16, glyphs.index.tokenizer).eval()


@pytest.fixture(scope="module")
def scored(encoders, tokenizer):
    def scored(train, test):
        result = compared("step-1", train, test)
        data = DataConfig(recipe="clip", image_size=16)
        score_encoders(result, encoders, data, CPU, tokenizer, PROMPTS)
        return result

    return scored


@pytest.fixture(scope="module")
def pictures(encoders):
    return lambda dataset: image_features(encoders.image, dataset, RECIPES["clip"], 16, CPU, quiet)


@pytest.fixture(scope="module")
def texts(encoders, tokenizer):
    return lambda texts: text_features(encoders.text, tokenizer, texts, CPU, quiet)


def test_with_several_captions_any_is_right_for_its_picture_and_each_is_a_query(
    scored, pictures, texts, glyphs, captions_dataset
):
    scores = scored(glyphs, captions_dataset).scores
    captions = captions_dataset.column("captions").to_pylist()
    flat = [(sample, text) for sample, texts in enumerate(captions) for text in texts]
    assert len(flat) > 1500
    similarity = pictures(captions_dataset) @ texts([text for _, text in flat]).T  # no text occurs twice
    owner = torch.tensor([sample for sample, _ in flat])
    for k in (1, 5, 10):
        to_text = owner[similarity.topk(k, dim=1).indices] == torch.arange(len(captions))[:, None]
        to_image = similarity.T.topk(k, dim=1).indices == owner[:, None]
        assert scores["image_to_text"][str(k)]["all"] == pytest.approx(to_text.any(1).float().mean().item())
        assert scores["text_to_image"][str(k)]["all"] == pytest.approx(to_image.any(1).float().mean().item())


def test_with_one_caption_a_sample_every_number_is_as_before_there_could_be_several(scored, pictures, texts, glyphs):
    result = scored(glyphs, glyphs)
    captions, bands = glyphs.column("caption").to_pylist(), result.classes.test_bands
    distinct = sorted(set(captions))
    assert len(distinct) < glyphs.n
    similarity = pictures(glyphs) @ texts(distinct).T
    of_picture = torch.tensor([distinct.index(caption) for caption in captions])
    right = of_picture[:, None] == torch.arange(len(distinct))

    def ranks(similarity, right):
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        return ((similarity >= best) & ~right).sum(1)

    found = {
        "image_to_text": ranks(similarity, right),
        "text_to_image": ranks(similarity.T.contiguous(), right.T)[of_picture],
    }
    for direction, rank in found.items():
        for k in (1, 5, 10):
            hits = (rank < k).numpy()
            expected = {"all": hits.mean()} | {
                name: hits[bands == band].mean() for band, name in enumerate(("head", "medium", "tail"))
            }
            assert result.scores[direction][str(k)] == expected


def test_zero_shot_counts_the_first_three_and_five_and_each_class_alike(scored, pictures, texts, glyphs):
    result = scored(glyphs, glyphs)
    names, truth = result.classes.names, result.classes.test.tolist()
    prompts = [[texts([f"the character {name.lower()}"])[0], texts([f"a {name}"])[0]] for name in names]
    classes = torch.stack([F.normalize(torch.stack(each).mean(0), dim=0) for each in prompts])
    ranking = (pictures(glyphs) @ classes.T).argsort(1, descending=True).tolist()
    first = [order[0] == code for order, code in zip(ranking, truth, strict=True)]
    scores = {variant: of["all"] for variant, of in result.scores["zero_shot"].items()}
    assert scores["top1"] == pytest.approx(np.mean(first))
    for k in (3, 5):
        among = [code in order[:k] for order, code in zip(ranking, truth, strict=True)]
        assert scores[f"top{k}"] == pytest.approx(np.mean(among))
    by_class = defaultdict(list)
    for code, is_right in zip(truth, first, strict=True):
        by_class[code].append(is_right)
    assert {len(each) for each in by_class.values()} == {2, 4}
    assert scores["mean_per_class"] == pytest.approx(np.mean([np.mean(each) for each in by_class.values()]))
    assert scores["mean_per_class"] != pytest.approx(scores["top1"])
    bands = result.scores["zero_shot"]["mean_per_class"]
    mean_of_bands = 0.34 * bands["head"] + 0.33 * bands["medium"] + 0.33 * bands["tail"]  # of 100 classes
    assert mean_of_bands == pytest.approx(bands["all"])


def test_weighted_neighbours_are_200_with_tau_0_07(scored, pictures, glyphs):
    result = scored(glyphs, glyphs)
    features, codes = pictures(glyphs).double(), result.classes.test.tolist()
    right = []
    for sample, code in zip(features, codes, strict=True):
        similarity, nearest = (features @ sample).topk(200)
        votes = Counter()
        for weight, other in zip((similarity / 0.07).exp().tolist(), nearest.tolist(), strict=True):
            votes[codes[other]] += weight
        right.append(votes.most_common(1)[0][0] == code)
    assert result.scores["knn"]["200_weighted"]["all"] == pytest.approx(np.mean(right), abs=0.01)  # ties in rounding
    assert result.scores["knn"]["200_weighted"] != result.scores["knn"]["200"]


@pytest.mark.wide
def test_probes_are_of_features_as_they_are_of_views_and_of_a_few_samples_a_class(glyphs, encoders, monkeypatch):
    data, result = DataConfig(recipe="clip", image_size=16), compared("", glyphs, glyphs)
    short = scoring.Sgd(3, 1024, 0.4)
    monkeypatch.setattr(evaluating, "MOCOV3", short)
    asked = evaluating.Probes(shots=(3,), draws=3, augment=RECIPES["glyphs"])
    made, epochs = evaluating.image_features, []
    monkeypatch.setattr(
        evaluating, "image_features", lambda *of, **how: epochs.append(how.get("epoch")) or made(*of, **how)
    )
    alone = Encoders(encoders.image)  # scored before the head
    score_encoders(result, alone, data, CPU, None, probes=asked)
    assert epochs == [None, None, 0, 1, 2]
    scores, truth = result.scores, torch.from_numpy(result.classes.test)
    view = (glyphs, RECIPES["clip"], 16, CPU, quiet)
    plain = image_features(encoders.image.backbone, *view, unit_norm=False)
    assert plain.norm(dim=1).mean() > 1.2

    def trained(features):
        """Three steps of plain momentum by the gradient of the mean loss, written down."""
        weight, bias = torch.zeros(100, plain.shape[1]), torch.zeros(100)
        momenta = torch.zeros_like(weight), torch.zeros_like(bias)
        for epoch in range(3):
            error = (features(epoch) @ weight.T + bias).softmax(1) - F.one_hot(truth, 100)
            gradients = error.T @ features(epoch) / glyphs.n, error.mean(0)
            momenta = tuple(0.9 * old + new for old, new in zip(momenta, gradients, strict=True))
            rate = 0.4 * 0.5 * (1 + np.cos(np.pi * epoch / 3))
            weight, bias = weight - rate * momenta[0], bias - rate * momenta[1]
        return ((plain @ weight.T + bias).argmax(1) == truth).float().mean().item()

    def views(epoch):
        return image_features(
            encoders.image.backbone, glyphs, RECIPES["glyphs"], 16, CPU, quiet, epoch=epoch, unit_norm=False
        )

    assert scores["probe"]["sgd_90"]["all"] == pytest.approx(trained(lambda epoch: plain), abs=0.006)  # two samples
    assert scores["probe"]["sgd_90_views"]["all"] == pytest.approx(trained(views), abs=0.006)
    assert not views(0).equal(views(1))
    shares = []
    for draw in range(3):
        few, unit = scoring.few_shot(truth, 3, draw), F.normalize(plain)
        theirs = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(unit[few], truth[few])
        shares.append(theirs.score(unit, truth))
    assert scores["few_shot"]["3"]["all"] == pytest.approx(np.mean(shares))
    assert len({*shares}) > 1
    assert result.half_widths["few_shot"]["3"]["all"] > 0
    assert any(
        note.startswith("Few-shot probes take all samples of 30 classes with fewer than 3") for note in result.notes
    )
