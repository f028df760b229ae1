"""Every objective in every mode and frame, features, rows of state, and one step.

A frame is what a step has beside two batches of features: keys and local views, made of the features themselves.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from thermopile.trainer.objectives import OBJECTIVES, Progress, create_objective

START = Progress(step=0, steps_per_epoch=10)


class Frame(NamedTuple):
    """Whether a step has keys, and how many local views, at most 2."""

    keys: bool = False
    local: int = 0

    def __str__(self):
        return ("-keys" if self.keys else "") + (f"-{self.local} local views" if self.local else "")


PLAIN = Frame()

PAPER = {"gamma_schedule": "constant", "tau_scale": "plain"}
"""FastCLIP's equations alone, without what their authors' code adds."""


def frames_of(name, mode):
    """The frames that an objective takes in a mode."""
    objective = OBJECTIVES[name]
    takes = objective.keys if mode == "unimodal" else "never"
    keys = {"never": [False], "optional": [False, True], "always": [True]}[takes]
    return [
        Frame(each, local)
        for each in keys
        for local in ((0, 2) if objective.has_local and mode == "unimodal" else (0,))
    ]


FRAMED = [
    (name, mode, frame)
    for name, objective in OBJECTIVES.items()
    for mode in objective.settings_of_mode
    for frame in frames_of(name, mode)
]


def turned(rows, columns):
    """The rows with their first columns in another order: as long, to the last bit, and much like themselves."""
    return torch.cat([rows[..., 1:columns], rows[..., :1], rows[..., columns:]], dim=-1)


def keys_of(frame, first, second):
    """Keys of the two views, or None."""
    return (turned(first.detach(), 4), turned(second.detach(), 4)) if frame.keys else None


def local_of(frame, first, second):
    """Local views; what they get as a gradient, the features get."""
    return [turned(side, 2) for side in (first, second)][: frame.local]


def directions_of(frame, across, first, second):
    """Return anchors, the rows of their positives and the tables of their candidates, for each direction."""
    views, targets = [first, second, *local_of(frame, first, second)], keys_of(frame, first, second) or (first, second)
    pairs = [(view, target) for view in range(len(views)) for target in (0, 1) if view != target]
    return [(views[v], targets[a], [targets[a]] if across or frame.keys else targets) for v, a in pairs]


def make_objective(name, mode, frame=PLAIN, **settings):
    """The objective with those of `settings` that it knows; `step` calls it with this frame."""
    known = OBJECTIVES[name].settings_of_mode[mode].model_fields
    # Rows of norm 1 are on the edge of the ball of mu = 1, where the gradient jumps.
    settings = {"mu": 0.9} | PAPER | settings
    objective = create_objective(name, mode, **{key: value for key, value in settings.items() if key in known})
    objective.frame = frame
    return objective.double()


def make_features(samples, seed=0, dtype=torch.float64, columns=16):
    """Unit-norm rows of two sides, [samples, columns], of which pairs are alike."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(samples, columns, generator=generator, dtype=torch.float64)
    second = first + torch.randn(samples, columns, generator=generator, dtype=torch.float64)
    return [F.normalize(side, dim=1).to(dtype).requires_grad_() for side in (first, second)]


def make_state(objective, samples, seed=0, dtype=torch.float64, tau=(0.05, 0.3), unseen=0.5):
    """Rows of samples of which about the share `unseen` was never seen, with temperatures within `tau`."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * torch.rand(samples, generator=generator, dtype=torch.float64)

    new = uniform(0, 1) < unseen
    of_seen = dict.fromkeys(("log_s", "log_g", "log_rate"), (-3, 1))
    of_seen |= {"tau": tau, "u": (-1, 1), "m": (-1, 1), "v": (0.5, 1)}
    state = {}
    for path, initial in objective.fields.items():
        field = path.split("/")[1]
        values = uniform(*of_seen[field])
        state[path] = (values if field == "tau" else torch.where(new, initial, values)).to(dtype)
    return state | ({"visits": torch.where(new, 0.0, 3.0).to(dtype)} if state else {})


def one_step(objective, first, second, state, progress=START):
    """One step in the objective's frame."""
    frame = getattr(objective, "frame", PLAIN)
    keys, local = keys_of(frame, first, second), local_of(frame, first, second)
    return objective(first, second, state, progress, keys=keys, local=local)


def run_step(objective, features, state, progress=START):
    """One step: its outcome, then the gradients of the two features and of the objective's own parameters."""
    first, second = (side.detach().clone().requires_grad_() for side in features)
    objective.zero_grad()
    outcome = one_step(objective, first, second, state, progress)
    outcome.loss.backward()
    return outcome, first.grad, second.grad, *(parameter.grad for parameter in objective.parameters())


def log_mean(first, second, tau, mode):
    """log g of every anchor, [2, b]: the mean over its negatives of exp((S_ij - S_ii) / tau_i), all written out.

    tau broadcasts to [2, b]. Unimodal negatives are both views of the other samples.
    """
    itself = torch.eye(len(first), dtype=torch.bool)
    if mode == "bimodal":
        similarities = torch.stack([first @ second.T, second @ first.T])
    else:
        views = torch.cat([first, second])
        similarities, itself = (views @ views.T).unflatten(0, (2, -1)), torch.cat([itself, itself], dim=1)
    positive = (first * second).sum(1)
    exponents = (similarities - positive[:, None]) / tau.expand(2, len(first))[:, :, None]
    negatives = (~itself[0]).sum().item()
    return exponents.masked_fill(itself, -math.inf).logsumexp(2) - math.log(negatives)
