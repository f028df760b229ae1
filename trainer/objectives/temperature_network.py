"""TempNet's network, which predicts a temperature from a feature: transformation, projection, aggregation.

Layers, initial values and dropout are those of the authors' code (Qiu et al., ICML 2024; github.com/zhqiu/TempNet,
Bimodal_CL/models/losses.py, TempGenerator).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FIRST_SCALE = 0.01
"""Initial temperature of the softmax over prototypes; learned as its logarithm."""


class TemperatureNetwork(nn.Module):
    """Maps features, [m, d], to temperatures within (tau_min, tau_max), [m].

    With v = sigmoid(A x + c), z_k = v · p_k / |p_k| and q = softmax(z / scale) over the prototypes p_k:
    tau = tau_min + (tau_max - tau_min) · sigmoid(sum_k w_k (q_k - 1/prototypes) sigmoid(z_k) + bias).
    """

    def __init__(self, width: int, prototypes: int, tau_min: float, tau_max: float, generator: torch.Generator) -> None:
        """width: d. generator: draws the initial weights, on the CPU."""
        super().__init__()
        self._tau_min, self._range = tau_min, tau_max - tau_min
        bound = 1 / math.sqrt(width)  # torch's bound for a linear layer
        self.transform = nn.Parameter(torch.empty(width, width).uniform_(-bound, bound, generator=generator))
        self.shift = nn.Parameter(torch.empty(width).uniform_(-bound, bound, generator=generator))
        self.prototypes = nn.Parameter(torch.empty(prototypes, width).normal_(generator=generator))
        self.log_scale = nn.Parameter(torch.tensor(math.log(FIRST_SCALE)))
        self.weights = nn.Parameter(torch.ones(prototypes))
        self.bias = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def start_at(self, features: Tensor) -> None:
        """Set the prototypes to the first of the features, [m, d], repeating them if there are too few.

        With random prototypes, the prototype most similar to every v takes the softmax, and all samples have about the
        same tau. Features of untrained encoders are so similar that q depends on the sample.
        """
        count = len(self.prototypes)
        self.prototypes.copy_(features.repeat(-(-count // len(features)), 1)[:count])

    def forward(self, features: Tensor, kept: Tensor | None = None) -> Tensor:
        """Compute in the features' dtype. kept: factors of v, [m, d], 0 where dropout drops it; None: no dropout."""
        transform, shift, prototypes, log_scale, weights, bias = (own.to(features.dtype) for own in self.parameters())
        transformed = torch.sigmoid(F.linear(features, transform, shift))
        if kept is not None:
            transformed = transformed * kept
        products = transformed @ F.normalize(prototypes, dim=1).T
        shares = (products / log_scale.exp()).softmax(1) - 1 / len(prototypes)
        return self._tau_min + self._range * torch.sigmoid((shares * products.sigmoid()) @ weights + bias)
