"""Linear probes: right where classes can be parted, the papers' recipe step for step, no setting to choose."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from thermopile.trainer.evaluation import scoring


def quiet(done, total):
    pass


def clusters(seed, n, classes=3, spread=0.1):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    return F.normalize(torch.eye(4)[labels] + spread * torch.randn(n, 4, generator=generator)), labels


def test_both_probes_part_clusters():
    (train, labels), (test, truth) = clusters(0, 600), clusters(1, 90)
    predicted, converged = scoring.lbfgs_probe(train, labels, test)
    assert converged
    assert predicted.equal(truth)
    assert scoring.sgd_probe(train, labels, test, quiet).equal(truth)


def test_the_lbfgs_probe_does_not_depend_on_the_scale_of_a_feature():
    (train, labels), (test, _) = clusters(0, 90, spread=0.8), clusters(1, 90, spread=0.8)
    scale = torch.tensor([1.0, 1000.0, 0.001, 1.0])
    plain, scaled = (scoring.lbfgs_probe(train * by, labels, test * by)[0] for by in (1, scale))
    assert (plain == scaled).float().mean() > 0.98


def test_the_lbfgs_probe_says_that_it_did_not_converge(monkeypatch):
    monkeypatch.setattr(scoring, "LBFGS_ITERATIONS", 1)
    train, labels = clusters(0, 90)
    assert not scoring.lbfgs_probe(train, labels, train)[1]


def isogclr(epoch, epochs):
    return 30 * 0.2 ** sum(epoch >= drop for drop in (40, 60, 80))


def moco_v3(epoch, epochs):
    return 0.1 * 1024 / 256 * 0.5 * (1 + np.cos(np.pi * epoch / epochs))


@pytest.mark.parametrize(
    ("how", "epochs", "rate", "nesterov"),
    [
        (scoring.ISOGCLR, 100, isogclr, 0.9),
        (scoring.MOCOV3, 90, moco_v3, 0),
        (scoring.MOCOV3._replace(epochs=10), 10, moco_v3, 0),
    ],
    ids=["iSogCLR", "MoCo v3", "MoCo v3, far from its end"],
)
def test_the_sgd_probes_are_the_papers_recipes(how, epochs, rate, nesterov):
    """Epochs of one batch each, by hand: Nesterov's momentum of 0.9 with steps, or a plain one along a cosine."""
    (train, labels), (test, _) = clusters(0, 60, spread=1.0), clusters(1, 5000, spread=1.0)
    inputs = np.hstack([train.double().numpy(), np.ones((60, 1))])
    weight, momentum = np.zeros((3, 5)), np.zeros((3, 5))
    for epoch in range(epochs):
        logits = inputs @ weight.T
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gradient = (p - np.eye(3)[labels]).T @ inputs / 60
        momentum = 0.9 * momentum + gradient
        weight -= rate(epoch, epochs) * (gradient + nesterov * momentum if nesterov else momentum)
    expected = (np.hstack([test.numpy(), np.ones((5000, 1))]) @ weight.T).argmax(1)
    predicted = scoring.sgd_probe(train, labels, test, quiet, how).numpy()
    assert (predicted == expected).mean() > 0.998  # float32 here, float64 there


def test_the_sgd_probe_is_trained_on_the_features_of_each_epoch():
    (train, labels), (test, truth) = clusters(0, 600), clusters(1, 90)
    epochs = []

    def features(epoch):
        epochs.append(epoch)
        return train if epoch < 2 else torch.zeros_like(train)

    how = scoring.Sgd(4, 1024, 1.0)
    assert scoring.sgd_probe(features, labels, test, quiet, how).equal(truth)
    assert epochs == [0, 1, 2, 3]


def test_few_shot_class_are_drawn_and_all_of_a_smaller_one():
    labels = torch.tensor([0] * 50 + [2] * 30 + [1] * 2 + [0] * 20)
    drawn = [scoring.few_shot(labels, 4, seed) for seed in range(3)]
    for places in drawn:
        assert len(places.unique()) == len(places)
        assert labels[places].bincount().tolist() == [4, 2, 4]
    assert scoring.few_shot(labels, 4, 0).equal(drawn[0])
    assert not drawn[0].equal(drawn[1])
    often = torch.cat([scoring.few_shot(labels, 4, seed) for seed in range(300)]).bincount(minlength=102)
    assert often[labels == 0].float().mean() == pytest.approx(300 * 4 / 70)
    assert often[labels == 0].max() < 2.5 * 300 * 4 / 70


def test_the_sgd_probe_gives_the_same_every_time_and_shows_each_epoch():
    (train, labels), (test, _) = clusters(0, 600, spread=1.0), clusters(1, 90, spread=1.0)
    done = []
    first = scoring.sgd_probe(train, labels, test, lambda *at: done.append(at))
    assert done == [(epoch, 100) for epoch in range(1, 101)]
    assert scoring.sgd_probe(train, labels, test, quiet).equal(first)
