"""What a user writes: an encoder for each side, an objective with state of its own, a recipe and a source."""

from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import thermopile
from thermopile import Outcome, Recipe, Sample, Settings


class Tower(nn.Module):
    """Pixels → features, by one convolution."""

    def __init__(self, image_size, width=12):
        super().__init__()
        self.width = width
        self.body = nn.Sequential(nn.Conv2d(3, width, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images):
        return self.body(images)


class Wasteful(Tower):
    """A tower with weights that its features do not depend on; some of them are not learned."""

    def __init__(self, image_size, width=12):
        super().__init__(image_size, width)
        self.classifier = nn.Linear(width, 10)
        self.fixed = nn.Linear(width, 10).requires_grad_(False)


class Words(nn.Module):
    """Tokens → the mean of their embeddings."""

    def __init__(self, tokenizer, width=10):
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(tokenizer.vocab_size, width)

    def forward(self, tokens):
        return self.embedding(tokens).mean(1)


class WeightedSettings(Settings):
    tau: float = 0.2
    memory: float = 0.9


class Weighted(thermopile.Objective):
    """InfoNCE that weights a sample by the moving average of its own loss."""

    settings_of_mode = {"bimodal": WeightedSettings, "unimodal": WeightedSettings}  # noqa: RUF012

    def __init__(self, mode, settings):
        super().__init__(mode, settings, mean_loss=0.0)
        self.scale = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    def loss(self, first, second, own, state, progress):
        logits = first[own] @ second.T / self.settings.tau * self.scale.exp().to(first.dtype)
        losses = F.cross_entropy(logits, torch.arange(len(second))[own], reduction="none")
        new = {
            field: self.settings.memory * old + (1 - self.settings.memory) * losses
            for field, old in state.items()
            if field != "visits"
        }
        weights = 1 + next(iter(new.values())).detach()
        return Outcome((weights * losses).mean(), new, {"plain": losses.mean()})


SOFT = Recipe(scale=(0.5, 1.0), flip=0.0, blur=(0.1, 0.1))


class Pictures(thermopile.Source):
    """The PNG files of a folder; captions are their names."""

    mode = "pairs"

    def __init__(self, folder, suffix="png"):
        self.files = sorted(Path(folder).rglob(f"*.{suffix}"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        return Sample(self.uri(index), self.key(index), file.read_bytes(), f"picture {file.stem}", None)

    def uri(self, index):
        return str(self.files[index])

    def key(self, index):
        return self.files[index].stem

    def captions(self, indices):
        return (f"picture {self.files[i].stem}" for i in indices)

    def describe(self):
        return {"kind": "pictures", "samples": len(self)}


class OfOneSize(Weighted):
    """Keeps a number for each row of the first batch, and takes no other size."""

    def loss(self, first, second, own, state, progress):
        if not hasattr(self, "bias"):
            self.bias = torch.zeros(len(first))
        return super().loss(first + self.bias[:, None], second, own, state, progress)


class Squares(Pictures):
    """SRC pictures of 8 pixels, whose classes, in rising order, have about three times as many samples each."""

    mode = "images"

    def __init__(self, src):
        self.files = [Path(f"{number:03}.png") for number in range(int(src))]

    def __getitem__(self, index):
        picture = Image.new("RGB", (8, 8), (index % 256, index // 256, 90))
        group = "abc"[2 - (index % 10 < 3) - (index % 10 < 1)]
        return Sample(self.uri(index), self.key(index), picture, group=group)

    def captions(self, indices):
        return ()


class Defect(Squares):
    def __getitem__(self, index):
        return super().__getitem__(index)._replace(key=len(index))
