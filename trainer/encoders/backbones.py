"""Backbones: pictures or tokens → features. What every one is, and the small ones that are built in."""

from __future__ import annotations

from torch import Tensor, nn

from .activation_checkpointing import run_blocks


class Backbone(nn.Module):
    """Pictures or tokens → features h, [b, width]: what is kept of an encoder once it is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class BuiltIn(Backbone):
    """A small backbone, computed again as a whole where its activations are not to be kept."""

    def __init__(self, body: nn.Module, width: int, recompute: bool) -> None:
        super().__init__(width)
        self.body = body
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        """float32 [b, 3, H, W], or int [b, L], → [b, width]."""
        return run_blocks([self.body], inputs, recompute=self.recompute)


def conv(recompute: bool, width: int = 32) -> BuiltIn:
    """Three strided convolutions: for small pictures, 32 pixels or so."""
    body = nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(),
    )  # fmt: skip
    return BuiltIn(body, 4 * width * 16, recompute)


def mean_embedding(recompute: bool, vocab_size: int, end_id: int, width: int = 128) -> BuiltIn:
    """The mean of the token embeddings and a hidden layer; word order does not count."""
    body = nn.Sequential(MeanOfTokens(vocab_size, end_id, width), nn.Linear(width, 2 * width), nn.ReLU())
    return BuiltIn(body, 2 * width, recompute)


class MeanOfTokens(nn.Module):
    """The mean of a caption's token embeddings."""

    def __init__(self, vocab_size: int, end_id: int, width: int) -> None:
        super().__init__()
        self.end_id = end_id
        self.embedding = nn.Embedding(vocab_size, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int [b, L] → [b, width]."""
        real = caption_mask(tokens, self.end_id).unsqueeze(-1)
        mean: Tensor = (self.embedding(tokens) * real).sum(1) / real.sum(1).clamp(min=1)
        return mean


def caption_mask(tokens: Tensor, end_id: int) -> Tensor:
    """Which tokens are a caption's, bool [b, L]: those up to its first closing token. Everything behind is padding.

    tokens: int [b, L]. Not told by a pad id: CLIP's tokenizer, for one, pads with the closing token itself.
    """
    is_end = tokens == end_id
    return (is_end.cumsum(1) - is_end.long()) == 0
