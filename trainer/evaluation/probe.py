"""Linear probes: a linear classifier on frozen features. All settings are fixed; nothing is tuned."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LBFGS_ITERATIONS = 1000

# iSogCLR (ICML 2023), linear evaluation.
EPOCHS = 100
BATCH = 256
LEARNING_RATE = 30.0
DROPS = (40, 60, 80)
"""Epochs before which the learning rate is multiplied by DROP."""
DROP = 0.2
MOMENTUM = 0.9


def predict_lbfgs(train: Tensor, labels: Tensor, test: Tensor) -> tuple[Tensor, bool]:
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


def predict_sgd(
    train: Tensor, labels: Tensor, test: Tensor, on_progress: Callable[[int, int], None], seed: int = 0
) -> Tensor:
    """Predict classes by the papers' recipe: SGD with Nesterov momentum, no weight decay, step decay of the rate.

    train, test: float32 [n, d] and [m, d], rows of norm 1, which this high a learning rate requires. labels: int64 [n],
    from 0. Returns int64 [m], from the last epoch's classifier. `seed` determines the order of the samples.
    Source: iSogCLR (ICML 2023), which does not state the momentum; 0.9 as in MoCo, whose recipe it is.
    """
    model = nn.Linear(train.shape[1], int(labels.max()) + 1, device=train.device)
    nn.init.zeros_(model.weight)  # the loss is convex: there is no symmetry to break
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, nesterov=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(DROPS), DROP)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(EPOCHS):
        shuffled = torch.randperm(len(train), generator=generator).to(train.device)
        for first in range(0, len(train), BATCH):
            rows = shuffled[first : first + BATCH]
            loss = F.cross_entropy(model(train[rows]), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        on_progress(epoch + 1, EPOCHS)
    with torch.inference_mode():
        predicted: Tensor = model(test).argmax(1)
    return predicted
